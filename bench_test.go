package redislock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"example.com/redislock/internal/store"
)

func BenchmarkKey(b *testing.B) {
	keys := []struct {
		name string
		key  KeyFunc
	}{{"ByTypeAndPayload", ByTypeAndPayload}, {"ByJSON whole", ByJSON()}, {"ByJSON fields", ByJSON("id", "tenant.name")}}
	for _, size := range []int{100, 1_000, 10_000, 100_000} {
		payload := fmt.Appendf(nil, `{"id": 12, "tenant": {"name": "acme"}, "text": %q}`, strings.Repeat("x", size-54))
		task := asynq.NewTask("report:nightly", payload)
		for _, k := range keys {
			b.Run(fmt.Sprintf("%s/%d", k.name, size), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(payload)))
				for b.Loop() {
					if _, err := k.key(b.Context(), task); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// What a task costs where Redis is not asked, or costs nothing.
func BenchmarkWithoutRedis(b *testing.B) {
	l := lockerOnNothing(b, WithPolicy(Skip()), WithKey(func(_ context.Context, task *asynq.Task) (string, error) {
		if task.Type() == "unlocked" {
			return "", NoLock
		}
		return task.Type(), nil
	}))
	nothing := func(context.Context) error { return nil }
	b.Run("acquire and release", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := l.Do(b.Context(), "free", nothing); err != nil {
				b.Fatal(err)
			}
		}
	})
	held, err := l.TryAcquire(b.Context(), "held")
	if err != nil {
		b.Fatal(err)
	}
	defer held.Release(b.Context())
	handler := l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil }))
	for _, kind := range []string{"free", "held", "unlocked"} {
		task := asynq.NewTask(kind, nil)
		b.Run(kind+" task", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := handler.ProcessTask(b.Context(), task); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestALockAddsFewAllocations(t *testing.T) {
	const most = 10
	l := lockerOnNothing(t)
	got := testing.AllocsPerRun(100, func() {
		if err := l.Do(context.Background(), "n", func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
	})
	if got > most {
		t.Errorf("%v allocations per lock, want at most %d", got, most)
	}
}

func TestALockAllocatesLittleMoreThanItsTwoCommands(t *testing.T) {
	const most = 12
	rdb := redis.NewClient(&redis.Options{
		ContextTimeoutEnabled: true, Protocol: 2, DisableIdentity: true,
		Dialer: func(context.Context, string, string) (net.Conn, error) { return new(answers), nil },
	})
	defer rdb.Close()
	l, err := New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	bare := testing.AllocsPerRun(100, func() {
		value := uuid.NewString()
		set := redis.NewStatusCmd(ctx, "set", "key", value, "nx", "get", "px", 30_000)
		if _ = rdb.Process(ctx, set); !errors.Is(set.Err(), redis.Nil) {
			t.Error(set.Err())
		}
		if err := releaseScript.Run(ctx, rdb, []string{"key"}, value).Err(); err != nil {
			t.Error(err)
		}
	})
	got := testing.AllocsPerRun(100, func() {
		if err := l.Do(ctx, "n", func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
	})
	if got > bare+most {
		t.Errorf("%v allocations per lock, want at most %d more than the %v of its commands", got, most, bare)
	}
}

func lockerOnNothing(tb testing.TB, opts ...Option) *Locker {
	l, err := NewOn(nowhere{}, WithLogger(slog.New(slog.DiscardHandler)), Options(opts...))
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

// nowhere is a store that costs nothing: all its locks are free, and stay so.
type nowhere struct{}

func (nowhere) Same(store.Store) bool                        { return false }
func (nowhere) Name() string                                 { return "nowhere" }
func (nowhere) Transactional() bool                          { return false }
func (s nowhere) Bulk() store.Bulk                           { return s }
func (nowhere) Prompt(time.Duration) (claims, releases bool) { return true, true }
func (nowhere) ExtendAll(leases []store.Lease, _ time.Time) []error {
	return make([]error, len(leases))
}
func (nowhere) Read(context.Context, string) (string, bool, error)      { return "", false, nil }
func (nowhere) Free(context.Context, string) error                      { return nil }
func (nowhere) Bind(ctx context.Context, _ store.Owner) context.Context { return ctx }
func (nowhere) Extend(context.Context) error                            { return nil }
func (nowhere) Release(context.Context, store.End) (work, err error)    { return nil, nil }
func (nowhere) GiveBack(context.Context)                                {}

func (s nowhere) Claim(context.Context, store.Request) (store.Claim, error) {
	return store.Claim{Lease: s, Sent: time.Now()}, nil
}

// answers is a connection to a Redis where every lock is free. Its replies cost nothing.
type answers struct {
	net.Conn
	reply string
}

func (a *answers) Write(b []byte) (int, error) {
	switch {
	case bytes.Contains(b, []byte("\r\nset\r\n")):
		a.reply += "$-1\r\n"
	case bytes.Contains(b, []byte("\r\nevalsha\r\n")):
		a.reply += ":1\r\n"
	default: // of a new connection, which may send several at once
		for range bytes.Count(b, []byte("*")) {
			a.reply += "-ERR unknown command\r\n"
		}
	}
	return len(b), nil
}

func (a *answers) Read(b []byte) (int, error) {
	if a.reply == "" {
		return 0, io.EOF
	}
	n := copy(b, a.reply)
	a.reply = a.reply[n:]
	return n, nil
}

func (*answers) Close() error                     { return nil }
func (*answers) SetDeadline(time.Time) error      { return nil }
func (*answers) SetReadDeadline(time.Time) error  { return nil }
func (*answers) SetWriteDeadline(time.Time) error { return nil }
