package redislock

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{})
	goleak.VerifyTestMain(m)
}

// quiet keeps go-redis from telling the terminal about every connection that a test breaks.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}
