package redislock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// endings are the ways in which a handler ends; a task's number chooses one.
var endings = []func() error{
	func() error { return nil },
	func() error { return nil },
	func() error { return errors.New("failed") },
	func() error { return asynq.SkipRetry },
	func() error { return asynq.RevokeTask },
	func() error { panic("on purpose") },
}

// TestTenThousandTasksLeaveNothingBehind runs a mix of endings and copies on four hosts: a thousand tasks through asynq's
// servers, ten thousand through the same middleware without them, since their scripts are slow in virtual time.
func TestTenThousandTasksLeaveNothingBehind(t *testing.T) {
	t.Run("delivered by asynq", func(t *testing.T) {
		leaveNothingBehind(t, 1_000, func(w *virtual.World, h *virtual.Host, handler asynq.Handler) func(*asynq.Task) {
			mux := asynq.NewServeMux()
			mux.Handle("work:", handler)
			h.Serve(ServerConfig(asynq.Config{Concurrency: 50, LogLevel: asynq.FatalLevel}), mux)
			return func(task *asynq.Task) { w.Enqueue(task, asynq.MaxRetry(0), asynq.Timeout(10*time.Minute)) }
		})
	})
	t.Run("handed over directly", func(t *testing.T) {
		leaveNothingBehind(t, 10_000, func(w *virtual.World, h *virtual.Host, handler asynq.Handler) func(*asynq.Task) {
			return func(task *asynq.Task) {
				w.Spawn(func() {
					defer func() { _ = recover() }()
					var held *HeldError
					for errors.As(handler.ProcessTask(context.Background(), task), &held) {
						time.Sleep(held.RetryIn)
					}
				})
			}
		})
	})
}

func leaveNothingBehind(t *testing.T, tasks int, deliverBy func(*virtual.World, *virtual.Host, asynq.Handler) func(*asynq.Task)) {
	const (
		hosts  = 4
		batch  = 200 // at once; miniredis slows down with many keys
		window = time.Minute
	)
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var (
			b         books
			seen      atomic.Int64 // by the middleware
			lockers   []*Locker
			deliver   []func(*asynq.Task)
			links     []*virtual.Link
			mu        sync.Mutex
			succeeded = map[string]bool{}
		)
		work := asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(50 * time.Millisecond)
			var n int
			_, _ = fmt.Sscanf(string(task.Payload()), "%d", &n)
			err := endings[n%len(endings)]()
			if lock, ok := FromContext(ctx); ok && err == nil {
				mu.Lock()
				defer mu.Unlock()
				succeeded[lock.Key()] = true
			}
			return err
		})
		for i := range hosts {
			h := w.Host(fmt.Sprintf("host%d", i))
			l := locker(h, &b, WithDoneFor(window), WithPolicy(Retry(10*time.Second)), WithLogger(slog.New(slog.DiscardHandler)))
			locked := l.Middleware(work)
			lockers, links = append(lockers, l), append(links, h.LockLink)
			deliver = append(deliver, deliverBy(w, h, asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
				seen.Add(1)
				return locked.ProcessTask(ctx, task)
			})))
		}
		for _, script := range []*script{extendScript, releaseScript, doneScript} {
			script.Load(t.Context(), w.RDB) // so that a release is one command
		}

		settled := func() bool {
			return int64(b.count(EventRan, EventDone, EventRequeued)) == seen.Load() && w.Drained()
		}
		for n, delivered := 0, 0; delivered < tasks; n++ {
			copies := 1
			if n%10 < 2 {
				copies = 4
			}
			for i := range copies {
				deliver[(n+i)%hosts](asynq.NewTask("work:unit", []byte(fmt.Sprint(n))))
			}
			delivered += copies
			if n%batch == 0 || delivered >= tasks {
				w.Until(time.Hour, "all tasks are settled", settled)
				time.Sleep(20 * time.Second) // those that were put back
				w.Until(time.Hour, "all tasks are settled", settled)
			}
		}
		time.Sleep(5 * time.Second)
		for _, l := range lockers {
			checkIdle(t, l)
			if err := l.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		}

		for _, key := range w.Redis.Keys() {
			if !strings.HasPrefix(key, defaultPrefix) {
				continue
			}
			value, _ := w.Redis.Get(key)
			if holder, _ := decodeValue(value); !holder.Done || !succeeded[key] || w.Redis.TTL(key) <= 0 {
				t.Errorf("key left: %s = %s", key, value)
			}
		}
		b.balance(t, int(seen.Load()))
		if n := b.count(EventRan, EventDone); n < tasks {
			t.Errorf("%d of %d tasks ran or were done already: %s", n, tasks, &b)
		}

		// Each lock's value has its token, so its commands can be told from those of the next lock of the same key.
		for _, link := range links {
			released := map[string]bool{}
			for _, c := range link.Sent("") {
				value := slices.IndexFunc(c.Args, func(arg string) bool { return strings.HasPrefix(arg, valueVersion) })
				if value < 0 {
					continue
				}
				if released[c.Args[value]] {
					t.Fatalf("a command after the release: %s", c)
				}
				released[c.Args[value]] = c.Script == releaseScript.Hash() || c.Script == doneScript.Hash()
			}
			if len(released) == 0 {
				t.Error("no command was recorded")
			}
		}
	})
}
