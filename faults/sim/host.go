package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"example.com/redislock"
	"example.com/redislock/faults/history"
	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// host is one machine, with one server after the other.
type host struct {
	*virtual.Host
	world   *world
	rand    *rand.Rand
	started int
	current atomic.Pointer[process]
}

// process is one server with its Lockers. Handlers may outlive it.
type process struct {
	world   *world
	host    *host
	name    string
	server  *asynq.Server
	lockers map[string]*redislock.Locker // by task type
}

type deliveryKey struct{}

func newHost(w *world, name string, r *rand.Rand) *host {
	patient := r.Float64() < 0.5
	h := &host{world: w, rand: w.rand(name), Host: w.Host(name, func(o *redis.Options) {
		// A pipe, unlike a TCP connection, does not tell go-redis that it broke while nobody used it, so each one that did
		// costs one of a command's four attempts.
		o.MaxIdleConns = 3
		o.ContextTimeoutEnabled = patient // so that some release in their own goroutines
		if !patient {
			o.ReadTimeout = min(max(w.ttl/5, 200*time.Millisecond), 3*time.Second)
		}
	})}
	h.LockLink.Tap(func(c virtual.Command, reply []byte) { w.ledger.see(name, c, reply) })
	h.QueueLink.Answer(w.idle)
	h.Unwatched()
	return h
}

// idle answers what asynq asks all the time and what nothing comes of: real time goes into scripts above all.
func (w *world) idle(c virtual.Command) string {
	if c.Script == "" {
		return ""
	}
	switch keys := c.Keys(); {
	case len(keys) == 4 && strings.HasSuffix(keys[0], ":pending") && strings.HasSuffix(keys[1], ":paused") && !w.Redis.Exists(keys[0]):
		return "$-1\r\n"
	case len(keys) == 2 && (strings.HasSuffix(keys[0], ":scheduled") || strings.HasSuffix(keys[0], ":retry")) && !w.Redis.Exists(keys[0]):
		return ":0\r\n"
	case len(keys) == 1 && strings.HasSuffix(keys[0], ":lease") && !w.Redis.Exists(keys[0]):
		return "*0\r\n"
	case len(keys) == 1 && strings.HasSuffix(keys[0], ":aggregation_sets") && !w.Redis.Exists(keys[0]):
		return "+OK\r\n"
	}
	return ""
}

// start starts a server and its Lockers.
func (h *host) start() {
	w := h.world
	h.started++
	p := &process{world: w, host: h, name: fmt.Sprintf("%s-%d", h.Name, h.started), lockers: make(map[string]*redislock.Locker)}
	mux := asynq.NewServeMux()
	mux.Use(p.see)
	for _, k := range append([]kind{periodic}, w.kinds...) {
		opts := []redislock.Option{
			redislock.WithTypes(k.name), redislock.WithTTL(w.ttl), redislock.WithDoneFor(w.times(k.doneFor)), redislock.WithGracePeriod(w.times(k.grace)),
			redislock.WithObserver(p.observe), redislock.WithLogger(slog.New(slog.DiscardHandler)),
		}
		if k.opts != nil {
			opts = append(opts, k.opts(w)...)
		}
		locker, err := redislock.New(h.RDB, opts...)
		if err != nil {
			w.T.Errorf("locker of %s: %v", k.name, err)
			return
		}
		p.lockers[k.name] = locker
		mux.Use(locker.Middleware)
		handler := asynq.Handler(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error { return p.work(ctx, task, k) }))
		if k.shape == nested {
			handler = p.see(locker.Middleware(handler))
		}
		mux.Handle(k.name, handler)
	}
	p.server = h.Serve(redislock.ServerConfig(asynq.Config{
		Concurrency:              4 + h.rand.IntN(5),
		TaskCheckInterval:        min(max(w.ttl/12, 50*time.Millisecond), time.Minute),
		DelayedTaskCheckInterval: min(max(w.ttl/8, 200*time.Millisecond), time.Minute),
		JanitorInterval:          max(w.times(20), time.Minute),
		ShutdownTimeout:          max(w.between(h.rand, 0.1, 1), 100*time.Millisecond),
		RetryDelayFunc:           func(int, error, *asynq.Task) time.Duration { return max(w.ttl/2, time.Second) },
		LogLevel:                 asynq.FatalLevel,
	}), mux)
	h.current.Store(p)
}

// stop ends the server and then its Lockers, which wait a random time for handlers that don't care.
func (h *host) stop() {
	p := h.current.Load()
	p.server.Shutdown()
	ctx, cancel := context.WithTimeout(context.Background(), h.world.between(h.rand, 0.1, 3))
	defer cancel()
	var wg sync.WaitGroup
	var impatient atomic.Bool
	for _, l := range p.lockers {
		wg.Go(func() {
			if l.Shutdown(ctx) != nil {
				impatient.Store(true)
			}
		})
	}
	wg.Wait()
	bye := history.Record{Kind: history.KindBye, Process: p.name}
	if impatient.Load() {
		bye.Err = "handlers still run"
	}
	h.world.add(bye)
}

func (h *host) lockerOf(taskType string) *redislock.Locker { return h.current.Load().lockers[taskType] }

// schedule starts a scheduler, like the one of another host.
func (h *host) schedule() *asynq.Scheduler {
	w := h.world
	every := max(w.times(period).Truncate(time.Second), time.Second)
	return h.ScheduleWith(&asynq.SchedulerOpts{
		LogLevel: asynq.FatalLevel, HeartbeatInterval: w.times(50),
		PostEnqueueFunc: func(info *asynq.TaskInfo, err error) {
			if err == nil {
				w.enqueued(info.ID)
			}
		},
	}, fmt.Sprint("@every ", every), asynq.NewTask(periodic.name, nil), asynq.MaxRetry(4), asynq.Timeout(max(w.times(4), 4*time.Minute)))
}

// see stands outside of the lock's middleware and numbers the deliveries, to balance the books by.
func (p *process) see(next asynq.Handler) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		w := p.world
		w.handlers.Add(1)
		defer w.handlers.Add(-1)
		id, _ := asynq.GetTaskID(ctx)
		k := w.kindOf(task.Type())
		r := history.Record{Kind: history.KindSeen, Task: id, Type: task.Type(), Archives: k.archives, Grace: int64(w.times(k.grace))}
		if deadline, ok := ctx.Deadline(); ok {
			r.Until = int64(deadline.Sub(w.Began)) + 1
		}
		r.Outer, _ = ctx.Value(deliveryKey{}).(int64)
		r.Retried, _ = asynq.GetRetryCount(ctx)
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		w.cancellable(ctx, id, cancel)
		ctx, over := p.deliver(ctx, r)
		defer over()
		return next.ProcessTask(ctx, task)
	})
}

// cancellable lets cancel find the task's delivery. What asynq's own cancelling goes through, a published message, would stop the
// clock: miniredis sends it with a mutex held. On its last attempt a task is spared, since asynq, which does not know of this, would archive it.
func (w *world) cancellable(ctx context.Context, task string, cancel func()) {
	retried, _ := asynq.GetRetryCount(ctx)
	if most, _ := asynq.GetMaxRetry(ctx); retried < most {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.cancels[task] = cancel
	}
}

// cancel ends the context of a task's latest delivery, as asynq does when it takes a task back.
func (w *world) cancel(task string) {
	w.mu.Lock()
	cancel := w.cancels[task]
	w.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

// deliver begins a delivery.
func (p *process) deliver(ctx context.Context, r history.Record) (_ context.Context, over func()) {
	r.Process, r.Delivery = p.name, p.world.deliveries.Add(1)
	p.world.add(r)
	unwatch := context.AfterFunc(ctx, func() {
		p.world.add(history.Record{Kind: history.KindTaken, Process: r.Process, Delivery: r.Delivery, Task: r.Task})
	})
	return context.WithValue(ctx, deliveryKey{}, r.Delivery), func() { unwatch() }
}

func (w *world) kindOf(taskType string) kind {
	for _, k := range w.kinds {
		if k.name == taskType {
			return k
		}
	}
	return periodic
}

func (p *process) observe(ctx context.Context, e redislock.Event) {
	r := history.Record{Kind: string(e.Kind), Process: p.name, Task: e.TaskID, Type: e.TaskType, Key: e.Key, Holder: e.Holder.TaskID, Unlocked: e.Unlocked}
	r.Delivery, _ = ctx.Value(deliveryKey{}).(int64)
	if e.Err != nil {
		r.Err = e.Err.Error()
	}
	switch e.Kind {
	case redislock.EventAcquired:
		p.world.ledger.acquired(p.host.Name, p.name, r.Delivery, e)
	case redislock.EventReleased:
		if e.Err == nil {
			p.world.ledger.released(p.host.Name, e)
		}
	case redislock.EventLost, redislock.EventAbandoned:
	default:
		p.world.count(e.TaskType, e.Kind)
	}
	p.world.add(r)
}

// section is a critical section.
func (p *process) section(r history.Record, fn func() error) (err error) {
	r.Process, r.Kind = p.name, history.KindEnter
	p.world.add(r)
	p.world.working.Add(1)
	returned := false
	defer func() {
		p.world.worked.Store(p.world.now())
		p.world.working.Add(-1)
		r.Kind = history.KindExit
		switch {
		case !returned:
			r.Err = "panic or Goexit"
		case err != nil:
			r.Err = err.Error()
		}
		p.world.add(r)
	}()
	err = fn()
	returned = true
	return err
}

func (p *process) entry(ctx context.Context, task *asynq.Task, k kind) history.Record {
	id, _ := asynq.GetTaskID(ctx)
	n, _ := ctx.Value(deliveryKey{}).(int64)
	retried, _ := asynq.GetRetryCount(ctx)
	r := history.Record{Delivery: n, Task: id, Deaf: p.world.mannerOf(id, retried).deaf, DoneFor: int64(p.world.times(k.doneFor))}
	if lock, ok := redislock.FromContext(ctx); ok {
		r.Key = lock.Key()
		r.Fence, _ = lock.Fence()
	} else if name, err := p.lockers[k.name].Name(ctx, task); err == nil {
		r.Key, r.Unlocked = keyOf(name), true
	}
	return r
}

var errReleased = errors.New("released by hand")

// work is the handler.
func (p *process) work(ctx context.Context, task *asynq.Task, k kind) error {
	r := p.entry(ctx, task, k)
	retried, _ := asynq.GetRetryCount(ctx)
	m := p.world.mannerOf(r.Task, retried)
	err := p.section(r, func() error {
		if err := p.rest(ctx, m, m.takes/2); err != nil {
			return err
		}
		if err := p.inner(ctx, r, m, k); err != nil {
			return err
		}
		if lock, ok := redislock.FromContext(ctx); ok && m.act == checks {
			if err := lock.Check(ctx); err != nil && !m.deaf {
				return err
			}
		}
		if err := p.rest(ctx, m, m.takes/2); err != nil {
			return err
		}
		return end(m, retried)
	})
	if !errors.Is(err, errReleased) {
		return err
	}
	if lock, ok := redislock.FromContext(ctx); ok {
		_ = lock.Release(ctx) // without a marker; its result does not matter to the task
	}
	return nil
}

// end is how the handler's work comes out.
func end(m manner, retried int) error {
	switch {
	case m.act == failsAlways:
		return errors.New("fails always")
	case m.act == givesUp:
		return fmt.Errorf("gives up: %w", asynq.SkipRetry)
	case m.act == releases:
		return errReleased
	case retried > 0:
	case m.act == failsFirst:
		return errors.New("fails at its first attempt")
	case m.act == panics:
		panic("at its first attempt")
	case m.act == vanishes:
		runtime.Goexit()
	case m.act == pretends:
		return &redislock.HeldError{Key: "some other lock"}
	}
	return nil
}

// rest takes time, as long as the handler cares to go on.
func (p *process) rest(ctx context.Context, m manner, d time.Duration) error {
	if m.deaf {
		p.world.Deaf(d)
		return nil
	}
	return virtual.Busy(ctx, d)
}

// inner takes a second lock within the handler.
func (p *process) inner(ctx context.Context, r history.Record, m manner, k kind) error {
	if k.shape != doing && k.shape != trying {
		return nil
	}
	w, locker, name := p.world, p.lockers[k.name], k.name+" inside"
	bound := ctx
	if k.shape == trying { // such a lock does not end with the task
		bound = context.WithoutCancel(ctx)
	}
	numbered, over := p.deliver(bound, history.Record{Kind: history.KindTry, Task: r.Task, Grace: int64(w.times(k.grace))})
	defer over()
	r.Delivery, _ = numbered.Value(deliveryKey{}).(int64)
	ctx = context.WithValue(ctx, deliveryKey{}, r.Delivery)
	r.Key, r.Fence = keyOf(name), 0
	body := func(ctx context.Context) error {
		return p.section(r, func() error { return p.rest(ctx, m, m.takes/3) })
	}
	if k.shape == doing {
		return locker.Do(ctx, name, body)
	}
	lock, err := locker.TryAcquire(ctx, name)
	if err != nil {
		return err
	}
	defer lock.Release(ctx)
	both, cancel := context.WithCancel(lock.Context())
	defer cancel()
	defer context.AfterFunc(ctx, cancel)() // the outer lock's loss is a reason to stop as well
	return body(both)
}
