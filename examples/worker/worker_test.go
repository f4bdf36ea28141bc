package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"example.com/redislock"
	"github.com/hibiken/asynq"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDemoMakesOneReportPerNight(t *testing.T) {
	if testing.Short() {
		t.Skip("takes ten seconds of real time")
	}
	var out bytes.Buffer
	dir := t.TempDir()
	if err := runDemo(t.Context(), &out, dir); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	var last string
	for lines := bufio.NewScanner(&out); lines.Scan(); {
		last = lines.Text()
	}
	var enqueued, ran, skipped, retried, reports int
	if _, err := fmt.Sscanf(last, "summary: hosts=20 enqueued=%d ran=%d skipped=%d retried=%d reports=%d lost=0",
		&enqueued, &ran, &skipped, &retried, &reports); err != nil {
		t.Fatalf("last line %q: %v", last, err)
	}
	if enqueued != 40 || ran != 2 || skipped != 38 || retried == 0 || reports != 2 {
		t.Errorf("numbers are off: %s", last)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "reports-*", "*")); len(files) != 2 {
		t.Errorf("with -out, want two reports and nothing else to stay, got %v", files)
	}
}

func TestDemoCleansUpWhenStopped(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var out bytes.Buffer
	if err := runDemo(ctx, &out, ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want the context's error, got %v", err)
	}
	if strings.Contains(out.String(), "summary:") {
		t.Error("a demo that was stopped has no summary")
	}
	if left, _ := os.ReadDir(tmp); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestBooksThatDoNotBalanceAreRefused(t *testing.T) {
	good := books{enqueued: 40, ran: 2, skipped: 38, retried: 5, reports: 2}
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*books){
		"a host missing":    func(b *books) { b.enqueued, b.skipped = 39, 37 },
		"a second run":      func(b *books) { b.ran, b.skipped = 3, 37 },
		"no run":            func(b *books) { b.ran, b.skipped = 1, 39 },
		"a report too many": func(b *books) { b.reports = 3 },
		"a report missing":  func(b *books) { b.reports = 1 },
		"a task lost":       func(b *books) { b.skipped = 37 },
		"a task left":       func(b *books) { b.skipped, b.left = 37, 1 },
		"counted twice":     func(b *books) { b.skipped = 39 },
		"nothing cut short": func(b *books) { b.retried = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			b := good
			spoil(&b)
			if b.check() == nil {
				t.Errorf("accepted: %s", b)
			}
		})
	}
}

// TestWorkerMakesTheReportOnceAndStopsOnSignal runs the worker as the command does, on an embedded Redis.
func TestWorkerMakesTheReportOnceAndStopsOnSignal(t *testing.T) {
	m, err := embeddedRedis()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	signals := make(chan os.Signal, 10) // so that no signal of this test can end the process
	signal.Notify(signals, syscall.SIGTERM)
	defer signal.Stop(signals)
	log := captureLog(t)

	w := worker{redis: m.Addr(), concurrency: 2, ttl: 30 * time.Second, doneFor: time.Hour, out: filepath.Join(t.TempDir(), "new")}
	stopped := make(chan error, 1)
	go func() { stopped <- w.run() }()

	client := asynq.NewClient(asynq.RedisClientOpt{Addr: m.Addr()})
	defer client.Close()
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: m.Addr()})
	defer inspector.Close()
	for i := range 5 {
		if _, err := client.Enqueue(asynq.NewTask("report:nightly", []byte(`{"date":"2025-03-01"}`))); err != nil {
			t.Fatal(err)
		}
		if i > 0 && i < 4 {
			continue // the first comes alone, the others once the report is made
		}
		waitFor(t, "an empty queue", func() bool {
			info, err := inspector.GetQueueInfo("default")
			return err == nil && info.Size == 0
		})
	}
	for stop := false; !stop; {
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-stopped:
			if err != nil {
				t.Errorf("worker stopped with %v", err)
			}
			stop = true
		case <-time.After(time.Second): // the worker was not listening yet
		}
	}
	if files, _ := os.ReadDir(w.out); len(files) != 1 || files[0].Name() != "2025-03-01.txt" {
		t.Errorf("want one report, got %v", files)
	}
	if n := strings.Count(log(), `msg="report made"`); n != 1 {
		t.Errorf("want one run, got %d:\n%s", n, log())
	}
	if n := strings.Count(log(), "its work is done already"); n != 4 {
		t.Errorf("want 4 lines that say why a copy did not run, got %d:\n%s", n, log())
	}
}

func TestEmbeddedRedisLetsTimePass(t *testing.T) {
	m, err := embeddedRedis()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Set("k", "v"); err != nil {
		t.Fatal(err)
	}
	m.SetTTL("k", 50*time.Millisecond)
	waitFor(t, "the key to expire", func() bool { return !m.Exists("k") })
}

func TestReport(t *testing.T) {
	t.Run("adds up per region", func(t *testing.T) {
		text, err := totals("2025-03-01", strings.NewReader("region,product,revenue\nb,x,1\na,x,20\nb,y,300\n"))
		want := "Sales report 2025-03-01\n\n    a   20\n    b  301\n  all  321\n"
		if err != nil || string(text) != want {
			t.Errorf("got %q, %v; want %q", text, err, want)
		}
	})
	t.Run("refuses bad data", func(t *testing.T) {
		if _, err := totals("2025-03-01", strings.NewReader("region,product,revenue\na,x,many\n")); err == nil {
			t.Error("want an error")
		}
	})
	t.Run("replaces a file whole", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "r.txt")
		for _, text := range []string{"first, long", "second"} {
			if err := writeFile(path, []byte(text)); err != nil {
				t.Fatal(err)
			}
			if got, _ := os.ReadFile(path); string(got) != text {
				t.Errorf("got %q, want %q", got, text)
			}
		}
		if files, _ := os.ReadDir(filepath.Dir(path)); len(files) != 1 {
			t.Errorf("left behind: %v", files)
		}
	})
	t.Run("leaves nothing when it cannot", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "r.txt")
		if err := os.MkdirAll(filepath.Join(path, "a directory in the way"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := writeFile(path, []byte("text")); err == nil {
			t.Error("want an error")
		}
		if files, _ := os.ReadDir(filepath.Dir(path)); len(files) != 1 {
			t.Errorf("left behind: %v", files)
		}
	})
	t.Run("is not made when its lock is lost", func(t *testing.T) {
		r := &reporter{dir: t.TempDir(), log: slog.New(slog.DiscardHandler)}
		m, locker := newLocker(t)
		err := locker.Do(t.Context(), "report", func(ctx context.Context) error {
			m.FlushAll()
			return r.ProcessTask(ctx, asynq.NewTask("report:nightly", nil))
		})
		if !errors.Is(err, redislock.ErrLost) {
			t.Errorf("want ErrLost, got %v", err)
		}
		if files, _ := os.ReadDir(r.dir); len(files) > 0 {
			t.Errorf("made all the same: %v", files)
		}
	})
}

func TestDateOf(t *testing.T) {
	today := time.Now().UTC().Format(time.DateOnly)
	for name, c := range map[string]struct{ payload, want string }{
		"none":          {``, today},
		"empty object":  {`{}`, today},
		"a date":        {`{"date":"2025-03-01","host":"a"}`, "2025-03-01"},
		"not a date":    {`{"date":"../../etc/passwd"}`, ""},
		"no such day":   {`{"date":"2025-02-30"}`, ""},
		"not JSON":      {`date=2025-03-01`, ""},
		"not a string":  {`{"date":20250301}`, ""},
		"date in array": {`["2025-03-01"]`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := dateOf([]byte(c.payload))
			if (c.want == "") != (err != nil) || err == nil && got != c.want && got != time.Now().UTC().Format(time.DateOnly) {
				t.Errorf("got %q, %v; want %q", got, err, c.want)
			}
			if c.want != "" {
				return
			}
			r := &reporter{dir: t.TempDir(), log: slog.New(slog.DiscardHandler)}
			if err := r.ProcessTask(t.Context(), asynq.NewTask("report:nightly", []byte(c.payload))); !errors.Is(err, asynq.SkipRetry) {
				t.Errorf("want SkipRetry, since a retry would not help, got %v", err)
			}
		})
	}
}
