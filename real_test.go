package redislock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// A chosen part of what the other tests show in virtual time, on real servers and in real time: that the commands mean there
// what they mean in miniredis, and that a TTL is a TTL.

const realTTL = 3 * time.Second

// realLocker returns a Locker with realTTL that reports to b.
func realLocker(t *testing.T, rdb redis.UniversalClient, b *books, opts ...Option) *Locker {
	t.Helper()
	l, err := New(rdb, WithTTL(realTTL), WithObserver(b.observe), WithLogger(slog.New(slog.DiscardHandler)), Options(opts...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// eventually waits until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func TestOnRealServersALockLives(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		rdb := s.client(t)
		l := realLocker(t, rdb, &b, WithDoneFor(time.Hour))
		ctx := t.Context()

		lock, err := l.TryAcquire(ctx, "life")
		if err != nil {
			t.Fatal(err)
		}
		if value := rdb.Get(ctx, lock.Key()).Val(); value != valueOf(lock) || !strings.HasPrefix(value, "redislock/1 {") {
			t.Errorf("value %q", value)
		}
		if ttl := rdb.PTTL(ctx, lock.Key()).Val(); ttl <= 0 || ttl > realTTL {
			t.Errorf("TTL %v", ttl)
		}
		if _, err := l.TryAcquire(ctx, "life"); !errors.Is(err, ErrHeld) {
			t.Errorf("second acquire: %v", err)
		}
		if h, ok, err := l.Holder(ctx, "life"); err != nil || !ok || h.Done || h.PID != os.Getpid() {
			t.Errorf("holder %+v, %v, %v", h, ok, err)
		}

		held := time.Now()
		eventually(t, "the lock is held for longer than its TTL", func() bool {
			if err := lock.Context().Err(); err != nil {
				t.Fatal(context.Cause(lock.Context()))
			}
			return time.Since(held) > realTTL+realTTL/2
		})
		if err := lock.Check(ctx); err != nil {
			t.Errorf("check: %v", err)
		}
		if err := lock.Release(ctx); err != nil {
			t.Errorf("release: %v", err)
		}
		if n := rdb.Exists(ctx, lock.Key()).Val(); n != 0 {
			t.Error("the key is still there")
		}

		if err := l.Do(ctx, "life", func(context.Context) error { return errors.New("failed") }); err == nil {
			t.Error("Do hides its function's error")
		}
		if err := l.Do(ctx, "life", func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
		if err := l.Do(ctx, "life", func(context.Context) error { return nil }); !errors.Is(err, ErrDone) {
			t.Errorf("Do after Do: %v", err)
		}
		if ttl := rdb.PTTL(ctx, lock.Key()).Val(); ttl < 59*time.Minute {
			t.Errorf("the marker's TTL is %v", ttl)
		}
		if err := l.ForceRelease(ctx, "life"); err != nil {
			t.Error(err)
		}
		if _, ok, err := l.Holder(ctx, "life"); ok || err != nil {
			t.Errorf("holder after ForceRelease: %v, %v", ok, err)
		}
		b.balance(t, 0)
	})
}

func TestOnRealServersALockThatIsTakenAwayIsLost(t *testing.T) {
	takeAway := map[string]func(ctx context.Context, rdb *redis.Client, l *Locker, key string) error{
		"deleted": func(ctx context.Context, rdb *redis.Client, _ *Locker, key string) error {
			return rdb.Del(ctx, key).Err()
		},
		"overwritten": func(ctx context.Context, rdb *redis.Client, _ *Locker, key string) error {
			return rdb.Set(ctx, key, "x", 0).Err()
		},
		"flushed": func(ctx context.Context, rdb *redis.Client, _ *Locker, _ string) error {
			return rdb.FlushAll(ctx).Err()
		},
		"force": func(ctx context.Context, _ *redis.Client, l *Locker, _ string) error {
			return l.ForceRelease(ctx, "prey")
		},
		"another type": func(ctx context.Context, rdb *redis.Client, _ *Locker, key string) error {
			_, err := rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
				p.Del(ctx, key)
				p.LPush(ctx, key, "x")
				return nil
			})
			return err
		},
	}
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		for name, take := range takeAway {
			var b books
			rdb := s.client(t)
			l := realLocker(t, rdb, &b)
			err := l.Do(t.Context(), "prey", func(ctx context.Context) error {
				lock, _ := FromContext(ctx)
				if err := take(context.WithoutCancel(ctx), rdb, l, lock.Key()); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				<-ctx.Done()
				return context.Cause(ctx)
			})
			if !errors.Is(err, ErrLost) {
				t.Errorf("%s: %v", name, err)
			}
			if left, is := rdb.Type(t.Context(), "redislock:{prey}").Val(), map[string]string{"overwritten": "string", "another type": "list"}[name]; left != is && (left != "none" || is != "") {
				t.Errorf("%s: %q is at the key afterwards", name, left)
			}
			if b.count(EventLost) != 1 || b.count(EventReleased) != 0 {
				t.Errorf("%s: %s", name, &b)
			}
			rdb.FlushAll(t.Context())
		}
	})
}

func TestOnRealServersALostReplyDoesNotLoseTheLock(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		p := newProxy(t, s.addr)
		rdb := s.client(t, func(o *redis.Options) { o.Addr = p.addr })
		l := realLocker(t, rdb, &b, WithDoneFor(time.Hour))
		runs := 0

		swallowed := p.swallow("\r\nnx\r\n")
		if err := l.Do(t.Context(), "reply", func(context.Context) error { runs++; return nil }); err != nil || runs != 1 {
			t.Errorf("the acquire's reply was lost: %v, %d runs", err, runs)
		}
		if !isClosed(swallowed) {
			t.Error("no reply was swallowed")
		}
		if err := l.ForceRelease(t.Context(), "reply"); err != nil {
			t.Fatal(err)
		}

		swallowed = p.swallow(doneScript.Hash())
		if err := l.Do(t.Context(), "reply", func(context.Context) error { return nil }); err != nil {
			t.Errorf("the release's reply was lost: %v", err)
		}
		if !isClosed(swallowed) {
			t.Error("no reply was swallowed")
		}
		if h, ok, err := l.Holder(t.Context(), "reply"); !ok || !h.Done || err != nil {
			t.Errorf("no marker: %v, %v, %v", h, ok, err)
		}
		b.balance(t, 0)
		if n := b.count(EventReleased); n != 2 {
			t.Errorf("%s", &b)
		}
	})
}

func TestOnRealServersARestartWithoutDataIsALoss(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		l := realLocker(t, s.client(t), &b)
		err := l.Do(t.Context(), "restart", func(ctx context.Context) error {
			s.restart() // scripts are gone as well
			<-ctx.Done()
			return context.Cause(ctx)
		})
		if !errors.Is(err, ErrLost) {
			t.Errorf("%v", err)
		}
		b.balance(t, 0)
	})
}

func TestOnRealServersAServerThatStopsAnsweringCostsTheLockInTime(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		l := realLocker(t, s.client(t), &b)
		err := l.Do(t.Context(), "pause", func(ctx context.Context) error {
			s.pause()
			defer s.resume()
			<-ctx.Done()
			return context.Cause(ctx)
		})
		if !errors.Is(err, ErrLost) {
			t.Errorf("%v", err)
		}
		b.balance(t, 0)
	})
}

func TestOnRealServersARoundTripAcquiresAndOneReleases(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		rdb := s.client(t)
		l := realLocker(t, rdb, &b)
		work := func(context.Context) error { return nil }
		if err := l.Do(t.Context(), "warm-up", work); err != nil { // loads the script
			t.Fatal(err)
		}
		rdb.ConfigResetStat(t.Context())
		const n = 100
		for i := range n {
			if err := l.Do(t.Context(), fmt.Sprint(i), work); err != nil {
				t.Fatal(err)
			}
		}
		stats := rdb.Info(t.Context(), "commandstats").Val()
		for command, calls := range map[string]int{"set": n, "evalsha": n, "get": n, "del": n, "eval": 0, "pexpire": 0} {
			var got int
			if _, line, ok := strings.Cut(stats, "cmdstat_"+command+":calls="); ok {
				_, _ = fmt.Sscanf(line, "%d", &got)
			}
			if got != calls { // get and del run inside the script
				t.Errorf("%d calls of %s for %d locks, want %d", got, command, n, calls)
			}
		}
	})
}

func TestOnRealServersTheLeastPermissionsSuffice(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rule, found := strings.Cut(string(readme), "\nACL SETUSER locks on >PASSWORD ")
	rule, _, _ = strings.Cut(rule, "\n")
	if !found {
		t.Fatal("the README has no such rule any more")
	}
	_, more, found := strings.Cut(string(readme), "`WithFencing` needs `")
	more, _, _ = strings.Cut(more, "`")
	if !found {
		t.Fatal("the README does not say what WithFencing needs any more")
	}
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		set := []any{"ACL", "SETUSER", "locks", "on", ">secret"}
		for _, word := range strings.Fields(rule) {
			set = append(set, word)
		}
		if err := s.client(t).Do(t.Context(), set...).Err(); err != nil {
			t.Fatal(err)
		}
		var b books
		rdb := s.client(t, func(o *redis.Options) { o.Username, o.Password = "locks", "secret" })
		l := realLocker(t, rdb, &b, WithDoneFor(time.Minute))
		if err := l.Do(t.Context(), "acl", func(ctx context.Context) error {
			lock, _ := FromContext(ctx)
			return lock.Check(ctx)
		}); err != nil {
			t.Error(err)
		}
		if _, ok, err := l.Holder(t.Context(), "acl"); !ok || err != nil {
			t.Errorf("holder: %v, %v", ok, err)
		}
		if err := l.ForceRelease(t.Context(), "acl"); err != nil {
			t.Error(err)
		}
		lock, err := l.TryAcquire(t.Context(), "acl")
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}

		fenced := realLocker(t, rdb, &b, WithFencing())
		if _, err := fenced.TryAcquire(t.Context(), "fenced"); err == nil || errors.Is(err, ErrUnavailable) {
			t.Errorf("fenced, without its permissions: %v", err)
		}
		for _, word := range strings.Fields(more) {
			if err := s.client(t).Do(t.Context(), "ACL", "SETUSER", "locks", word).Err(); err != nil {
				t.Fatal(err)
			}
		}
		for _, stored := range []int64{0, math.MaxInt64 - 1} { // by Redis's time, and by the counter
			s.client(t).Set(t.Context(), fenced.prefix+"{fenced}:fence", stored, time.Minute)
			if err := fenced.Do(t.Context(), "fenced", func(context.Context) error { return nil }); err != nil {
				t.Error(err)
			}
		}

		other, err := New(rdb, WithKeyPrefix("elsewhere:"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := other.TryAcquire(t.Context(), "acl"); err == nil || errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "NOPERM") {
			t.Errorf("outside its keys: %v", err)
		}
	})
}

func TestOnRealServersAClusterClientWorks(t *testing.T) {
	eachProgram(t, func(t *testing.T, program string) {
		t.Parallel()
		var b books
		rdb := clusterServer(t, program)
		plain := realLocker(t, rdb, &b, WithDoneFor(time.Minute))
		fenced := realLocker(t, rdb, &b, WithDoneFor(time.Minute), WithFencing()) // two keys, one slot
		for i := range 20 {
			name, l := fmt.Sprint(i), []*Locker{plain, fenced}[i%2]
			if err := l.Do(t.Context(), name, func(ctx context.Context) error {
				lock, _ := FromContext(ctx)
				return lock.Check(ctx)
			}); err != nil {
				t.Fatal(err)
			}
			if _, err := l.TryAcquire(t.Context(), name); !errors.Is(err, ErrDone) {
				t.Fatal(err)
			}
		}
		b.balance(t, 0)
	})
}

func TestOnRealServersTwentyCopiesAreOneRun(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var (
			b       books
			mu      sync.Mutex
			runs    virtual.Tally
			failure = errors.New("the first run fails")
		)
		handler := asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			defer runs.Start("report")()
			time.Sleep(100 * time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			err := failure
			failure = nil
			return err
		})
		for range 3 {
			rdb := s.client(t)
			l := realLocker(t, rdb, &b, WithDoneFor(time.Hour))
			srv := asynq.NewServerFromRedisClient(rdb, ServerConfig(asynq.Config{
				Concurrency: 4, TaskCheckInterval: 50 * time.Millisecond, DelayedTaskCheckInterval: 100 * time.Millisecond,
				LogLevel: asynq.FatalLevel, RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Second },
			}))
			if err := srv.Start(l.Middleware(handler)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(srv.Shutdown)
		}
		client := asynq.NewClientFromRedisClient(s.client(t))
		for range 20 {
			if _, err := client.Enqueue(asynq.NewTask("report", nil)); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "every copy has run or been dropped", func() bool {
			ends := b.count(EventDone)
			for _, e := range b.of(EventRan) {
				if e.Err == nil {
					ends++
				}
			}
			return ends == 20
		})
		if n := b.count(EventRan); n != 2 || runs.Count("report") != 2 {
			t.Errorf("%d runs, want the one that failed and one more: %s", n, &b)
		}
		if overlaps := runs.Overlaps(); len(overlaps) > 0 {
			t.Error(overlaps)
		}
	})
}

// TestTwoWorkerProcessesAndTwentyHostsMakeOneReport is the promise, with the example programs as users run them.
func TestTwoWorkerProcessesAndTwentyHostsMakeOneReport(t *testing.T) {
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin, "./examples/worker", "./examples/enqueuer")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		reports := t.TempDir()
		var workers []*exec.Cmd
		var logs []*bytes.Buffer
		for range 2 {
			var log bytes.Buffer
			worker := exec.Command(filepath.Join(bin, "worker"), "-redis", s.addr, "-out", reports, "-ttl", "2s")
			worker.Stdout, worker.Stderr, worker.SysProcAttr = &log, &log, dieWithParent
			if err := worker.Start(); err != nil {
				t.Fatal(err)
			}
			workers, logs = append(workers, worker), append(logs, &log)
		}
		hosts := exec.CommandContext(t.Context(), filepath.Join(bin, "enqueuer"), "-redis", s.addr, "-once", "-hosts", "20", "-apart", "50ms",
			"-payload", `{"date":"2025-03-01"}`)
		if out, err := hosts.CombinedOutput(); err != nil {
			t.Errorf("enqueuer: %v\n%s", err, out)
		}
		inspector := asynq.NewInspectorFromRedisClient(s.client(t))
		eventually(t, "the queue is empty", func() bool {
			info, err := inspector.GetQueueInfo("default")
			return err == nil && info.Size == 0
		})
		made := 0
		for i, worker := range workers {
			if err := worker.Process.Signal(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
			if err := worker.Wait(); err != nil {
				t.Errorf("worker: %v\n%s", err, logs[i])
			}
			made += strings.Count(logs[i].String(), "report made")
		}
		files, err := filepath.Glob(filepath.Join(reports, "*"))
		if err != nil || len(files) != 1 || made != 1 {
			t.Errorf("%d reports made, files %v, %v", made, files, err)
			for _, log := range logs {
				t.Log(log)
			}
		}
	})
}
