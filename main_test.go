package redislock

import (
	"testing"

	"example.com/redislock/internal/virtual"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	redis.SetLogger(virtual.Quiet{})
	goleak.VerifyTestMain(m)
}
