package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"example.com/redislock"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

const (
	demoHosts   = 20                     // enqueue the report, each night
	demoWorkers = 4                      // run what is enqueued
	demoPace    = 250 * time.Millisecond // between one host and the next: their clocks are not the same
)

// demoNights are the days reported on. The first night's report is quick; in the second the worker that makes it is shut
// down in the middle.
var demoNights = [...]string{"2025-03-01", "2025-03-02"}

// books count what became of the tasks. Each time a worker gets a task there is one outcome, which either ends the task
// (ran, skipped) or puts it back (retried); so in the end enqueued = ran + skipped, and nothing is left or lost.
type books struct {
	enqueued int // tasks that Redis has accepted
	ran      int // runs of the handler that succeeded
	skipped  int // tasks dropped without a run, since the work was done (EventDone, EventSkipped)
	retried  int // times a task was put back: before its run (EventRequeued), or because its run was cut short
	reports  int // report files that exist
	left     int // tasks still in the queue or in the archive
}

func (b books) lost() int { return b.enqueued - b.ran - b.skipped - b.left }

func (b books) String() string {
	return fmt.Sprintf("summary: hosts=%d enqueued=%d ran=%d skipped=%d retried=%d reports=%d lost=%d",
		demoHosts, b.enqueued, b.ran, b.skipped, b.retried, b.reports, b.lost())
}

// check says what is wrong with the books after all nights.
func (b books) check() error {
	nights := len(demoNights)
	var wrong []error
	want := func(ok bool, what string) {
		if !ok {
			wrong = append(wrong, errors.New(what))
		}
	}
	want(b.enqueued == demoHosts*nights, "not every host has enqueued every night")
	want(b.left == 0, "tasks are left in the queue or the archive")
	want(b.ran == nights, "not one run a night")
	want(b.reports == nights, "not one report a night")
	want(b.ran+b.skipped == b.enqueued, "ran + skipped is not enqueued")
	want(b.retried > 0, "no task was put back, though one run was cut short")
	want(b.lost() == 0, "tasks are lost")
	return errors.Join(wrong...)
}

// demo is the world of -demo: a Redis, hosts that enqueue, workers that run.
type demo struct {
	addr  string
	dir   string
	began time.Time

	mu     sync.Mutex
	out    io.Writer
	books  books
	runs   map[string][]string // by night, the workers that started on its report
	midway chan struct{}       // closed when the report of the second night is being made
}

// runDemo plays all nights on an embedded Redis and writes a timeline and, as its last line, the summary. It fails when the
// numbers are not what they must be.
func runDemo(ctx context.Context, out io.Writer, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // ten times what it takes
	defer cancel()
	m, err := embeddedRedis()
	if err != nil {
		return err
	}
	defer m.Close()
	keep := dir != ""
	if keep {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if dir, err = os.MkdirTemp(dir, "reports-"); err != nil {
		return err
	}
	if !keep {
		defer os.RemoveAll(dir)
	}
	d := &demo{addr: m.Addr(), dir: dir, began: time.Now(), out: out, runs: map[string][]string{}, midway: make(chan struct{})}
	d.say("demo", "Redis at %s, %d workers, %d hosts that all enqueue report:nightly, reports in %s", d.addr, demoWorkers, demoHosts, dir)

	workers := map[string]*demoWorker{}
	stopAll := func() {
		var wg sync.WaitGroup
		for _, w := range workers {
			wg.Go(w.stop)
		}
		wg.Wait()
	}
	defer stopAll()
	for i := range demoWorkers {
		w, err := d.startWorker(fmt.Sprintf("worker-%d", i+1))
		if err != nil {
			return err
		}
		workers[w.name] = w
	}

	if err := d.night(ctx, 0, nil); err != nil {
		return err
	}
	if err := d.night(ctx, 1, func() { workers[d.runsOf(demoNights[1])[0]].stop() }); err != nil {
		return err
	}
	d.say("demo", "every host has enqueued every night; waiting until the queue is empty")
	if err := d.drain(ctx); err != nil {
		return err
	}
	stopAll()
	return d.close()
}

// night lets each host enqueue the same report. When its report is half made, the worker that makes it is interrupted.
func (d *demo) night(ctx context.Context, n int, interrupt func()) error {
	date := demoNights[n]
	d.say("demo", "night %d: the report of %s", n+1, date)
	for i := range demoHosts {
		host := fmt.Sprintf("host-%02d", i+1)
		if err := d.enqueue(ctx, host, fmt.Sprintf("%s/%s", date, host), date); err != nil {
			return fmt.Errorf("%s: enqueue: %w", host, err)
		}
		if i == 4 && interrupt != nil {
			select {
			case <-d.midway:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			interrupt()
		}
		select {
		case <-time.After(demoPace):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// enqueue does what a host's scheduler does. The task ID only makes the timeline readable; no two copies share one.
func (d *demo) enqueue(ctx context.Context, host, id, date string) error {
	client := asynq.NewClient(asynq.RedisClientOpt{Addr: d.addr})
	defer client.Close()
	d.say(host, "enqueues %s", id)
	payload := fmt.Appendf(nil, `{"date":%q}`, date)
	_, err := client.EnqueueContext(ctx, asynq.NewTask("report:nightly", payload), asynq.TaskID(id))
	if err != nil && !errors.Is(err, asynq.ErrTaskIDConflict) { // in conflict with itself: the first reply came too late
		return err
	}
	d.book(func(b *books) { b.enqueued++ })
	return nil
}

// drain waits until no task is left but archived ones, which wait for a person.
func (d *demo) drain(ctx context.Context) error {
	for {
		info, err := d.queue()
		if err != nil {
			return err
		}
		if info.Size == info.Archived {
			return nil
		}
		select {
		case <-time.After(demoPace):
		case <-ctx.Done():
			return fmt.Errorf("wait for an empty queue: %d tasks left: %w", info.Size, context.Cause(ctx))
		}
	}
}

func (d *demo) queue() (*asynq.QueueInfo, error) {
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: d.addr})
	defer inspector.Close()
	return inspector.GetQueueInfo("default")
}

// close balances the books, after everything has stopped.
func (d *demo) close() error {
	info, err := d.queue()
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(d.dir, "*.txt"))
	if err != nil {
		return err
	}
	d.book(func(b *books) { b.left, b.reports = info.Size, len(files) })
	wrong := d.books.check() // every worker has stopped, so the books are closed
	for _, date := range demoNights {
		if text, err := os.ReadFile(filepath.Join(d.dir, date+".txt")); err != nil {
			wrong = errors.Join(wrong, err)
		} else {
			fmt.Fprintf(d.out, "\n%s", text)
		}
	}
	if runs := d.runsOf(demoNights[1]); len(runs) < 2 || runs[0] == runs[len(runs)-1] {
		wrong = errors.Join(wrong, fmt.Errorf("the report of the second night was not finished by another worker: %v", runs))
	}
	fmt.Fprintf(d.out, "\n%s\n", d.books)
	if wrong != nil {
		return fmt.Errorf("the numbers are not what they must be: %w", wrong)
	}
	return nil
}

// demoWorker is what would be one process on one host: a Redis client, a Locker and an asynq server of its own.
type demoWorker struct {
	name   string
	demo   *demo
	rdb    *redis.Client
	locker *redislock.Locker
	srv    *asynq.Server
	once   sync.Once
}

func (d *demo) startWorker(name string) (*demoWorker, error) {
	quiet := slog.New(slog.DiscardHandler) // the timeline tells it all
	w := &demoWorker{name: name, demo: d, rdb: redis.NewClient(&redis.Options{Addr: d.addr})}
	var err error
	w.locker, err = redislock.New(w.rdb,
		redislock.WithTTL(6*time.Second), // a task that is put back comes again after half of it
		redislock.WithDoneFor(12*time.Hour),
		redislock.WithLogger(quiet),
		redislock.WithObserver(w.observe))
	if err != nil {
		return nil, errors.Join(err, w.rdb.Close())
	}
	mux := asynq.NewServeMux()
	mux.Use(w.locker.Middleware)
	mux.Handle("report:nightly", &reporter{dir: d.dir, log: quiet, gather: w.gather})
	w.srv = asynq.NewServerFromRedisClient(w.rdb, redislock.ServerConfig(asynq.Config{
		Concurrency:              2,
		ShutdownTimeout:          500 * time.Millisecond, // to see a run cut short
		TaskCheckInterval:        100 * time.Millisecond,
		DelayedTaskCheckInterval: 200 * time.Millisecond,
		LogLevel:                 asynq.FatalLevel,
	}))
	if err := w.srv.Start(mux); err != nil {
		return nil, errors.Join(err, w.rdb.Close())
	}
	return w, nil
}

// stop shuts the worker down as a process should: first the server, then the locks, then the client.
func (w *demoWorker) stop() {
	w.once.Do(func() {
		w.demo.say(w.name, "is told to shut down")
		w.srv.Shutdown()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := w.locker.Shutdown(ctx); err != nil {
			w.demo.say(w.name, "gives up on its locks: %v", err)
		}
		_ = w.rdb.Close()
		w.demo.say(w.name, "is gone")
	})
}

// gather takes its time: the first attempt of the second night more than anybody would wait for.
func (w *demoWorker) gather(ctx context.Context, date string) error {
	took := 50 * time.Millisecond
	before := w.demo.begin(w.name, date)
	switch {
	case len(before) > 0:
		took = time.Second
		w.demo.say(w.name, "makes the report that %s did not finish", before[len(before)-1])
	case date == demoNights[1]:
		took = time.Minute
		close(w.demo.midway)
	}
	select {
	case <-time.After(took):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// observe keeps the books and writes the timeline.
func (w *demoWorker) observe(_ context.Context, e redislock.Event) {
	d := w.demo
	switch e.Kind {
	case redislock.EventAcquired:
		d.say(w.name, "runs %s: it got the lock", e.TaskID)
	case redislock.EventRan:
		if e.Err != nil {
			d.book(func(b *books) { b.retried++ })
			d.say(w.name, "puts %s back: its run was cut short after %v: %v", e.TaskID, e.Held.Round(time.Millisecond), e.Err)
			return
		}
		d.book(func(b *books) { b.ran++ })
		d.say(w.name, "has finished %s in %v: report made", e.TaskID, e.Held.Round(time.Millisecond))
	case redislock.EventDone:
		d.book(func(b *books) { b.skipped++ })
		d.say(w.name, "drops %s: the work was done by %s", e.TaskID, e.Holder.TaskID)
	case redislock.EventSkipped:
		d.book(func(b *books) { b.skipped++ })
		d.say(w.name, "drops %s: the work is being done by %s", e.TaskID, e.Holder.TaskID)
	case redislock.EventRequeued:
		d.book(func(b *books) { b.retried++ })
		if e.Holder != (redislock.Holder{}) {
			d.say(w.name, "puts %s back: the lock is held by %s", e.TaskID, e.Holder.TaskID)
			return
		}
		d.say(w.name, "puts %s back: %v", e.TaskID, e.Err)
	case redislock.EventReleased, redislock.EventPassed:
	default: // nothing else should happen, so if it does, it should be seen
		d.say(w.name, "%s %s: %v", e.Kind, e.TaskID, e.Err)
	}
}

// begin notes that a worker has started on the report of a night, and returns those that did so before it.
func (d *demo) begin(worker, date string) (before []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before = d.runs[date]
	d.runs[date] = append(slices.Clone(before), worker)
	return before
}

func (d *demo) runsOf(date string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.runs[date]
}

func (d *demo) book(entry func(*books)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	entry(&d.books)
}

// say writes one line of the timeline: when, who, what.
func (d *demo) say(who, format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.out, "%6.2fs  %-8s  %s\n", time.Since(d.began).Seconds(), who, fmt.Sprintf(format, args...))
}
