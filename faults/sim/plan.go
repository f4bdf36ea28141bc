package sim

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"example.com/redislock"
	"github.com/hibiken/asynq"
)

// ttls are what a world's locks may have. Everything else in it is measured in TTLs.
var ttls = []time.Duration{
	time.Second, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute, 5 * time.Minute, 10 * time.Minute,
}

// kind is a task type. Each has a Locker with options of its own. No name begins with another's.
type kind struct {
	name     string
	doneFor  float64 // in TTLs
	grace    float64 // in TTLs
	archives bool    // the policy may archive
	failOpen bool
	shape    shape
	opts     func(w *world) []redislock.Option
}

type shape int

const (
	plain  shape = iota
	nested       // the middleware is mounted twice
	doing        // the handler calls Do
	trying       // the handler calls TryAcquire
)

func policy(p redislock.Policy) func(*world) []redislock.Option {
	return func(*world) []redislock.Option { return []redislock.Option{redislock.WithPolicy(p)} }
}

var kinds = []kind{
	{name: "skip", grace: 1},
	{name: "retry", grace: 3, opts: policy(redislock.Retry(0))},
	{name: "soon", grace: 0.5, opts: func(w *world) []redislock.Option {
		return []redislock.Option{redislock.WithPolicy(redislock.Retry(w.times(0.2)))}
	}},
	{name: "wait", grace: 2, opts: func(w *world) []redislock.Option {
		return []redislock.Option{redislock.WithPolicy(redislock.Wait(w.times(0.3)))}
	}},
	{name: "stay", grace: 2, doneFor: 1.5, opts: func(w *world) []redislock.Option {
		return []redislock.Option{redislock.WithPolicy(redislock.Wait(min(w.times(2), 20*time.Second)))}
	}},
	{name: "archive", grace: 1, archives: true, opts: policy(redislock.Archive())},
	{name: "decide", grace: 1, archives: true, opts: policy(redislock.PolicyFunc(decide))},
	{name: "once", grace: 1, doneFor: 2},
	{name: "drop", grace: 4, doneFor: 3, opts: policy(redislock.Skip())},
	{name: "open", grace: 1, failOpen: true, opts: func(*world) []redislock.Option {
		return []redislock.Option{redislock.WithPolicy(redislock.Retry(0)), redislock.WithFailOpen()}
	}},
	{name: "fenced", grace: 1, doneFor: 0.7, opts: func(*world) []redislock.Option { return []redislock.Option{redislock.WithFencing()} }},
	{name: "nested", grace: 2, doneFor: 0.5, shape: nested},
	{name: "doing", grace: 2, doneFor: 0.5, shape: doing, opts: policy(redislock.Retry(0))},
	{name: "trying", grace: 2, shape: trying, opts: policy(redislock.Retry(0))},
	{name: "json", grace: 0, opts: func(*world) []redislock.Option {
		return []redislock.Option{redislock.WithKey(redislock.ByJSON("key"))}
	}},
	{name: "free", grace: 1, opts: func(*world) []redislock.Option { return []redislock.Option{redislock.WithKey(unlessFree)} }},
}

// periodic is what the schedulers of several hosts enqueue.
var periodic = kind{name: "periodic", grace: 1, doneFor: 2.4}

const period = 3 // in TTLs

// mayDrop reports whether the policy of a type drops a task as a copy.
func mayDrop(taskType, task string) bool {
	switch taskType {
	case "skip", "drop":
		return true
	case "decide":
		return hash(task)%8 < 2
	}
	return false
}

var errDecided = errors.New("the policy function says no")

// decide gives every answer that a PolicyFunc has.
func decide(ctx context.Context, _ *asynq.Task, held *redislock.HeldError) error {
	id, _ := asynq.GetTaskID(ctx)
	switch hash(id) % 8 {
	case 0:
		return nil
	case 1:
		return asynq.RevokeTask
	case 2, 3:
		return held
	case 4:
		return fmt.Errorf("later: %w", &redislock.HeldError{RetryIn: 2 * time.Second})
	case 5:
		return fmt.Errorf("%w: %w", errDecided, asynq.SkipRetry)
	case 6:
		return errDecided
	default:
		panic("the policy function panics")
	}
}

// unlessFree is a KeyFunc that lets some tasks run without a lock.
func unlessFree(ctx context.Context, task *asynq.Task) (string, error) {
	if strings.Contains(string(task.Payload()), "free") {
		return "", redislock.NoLock
	}
	return redislock.ByTypeAndPayload(ctx, task)
}

// act is what a handler does when its time is over.
type act int

const (
	succeeds act = iota
	failsFirst
	failsAlways
	givesUp  // fails with asynq.SkipRetry
	panics   // at its first attempt
	vanishes // runtime.Goexit, at its first attempt
	checks   // calls Check half way
	releases // calls Release itself
	pretends // fails with a HeldError of its own
)

// manner is how the handler of a task behaves.
type manner struct {
	takes time.Duration
	deaf  bool // it does not look at its context
	act   act
}

// mannerOf is the same wherever a task runs. A retry is short, so that a queue of long work comes to an end.
func (w *world) mannerOf(task string, retried int) manner {
	r := rand.New(rand.NewPCG(w.seed, hash(task)))
	var m manner
	switch p := r.Float64(); {
	case p < 0.6:
		m.takes = w.times(0.01 + 0.2*r.Float64())
	case p < 0.85:
		m.takes = w.times(0.3 + 1.2*r.Float64())
	case p < 0.97:
		m.takes = w.times(1 + 3*r.Float64())
		m.deaf = r.Float64() < 0.5
	case w.ttl < time.Minute: // longer than asynq's lease, so that a host without its queue loses the task to another
		m.takes = time.Duration(60+r.IntN(100)) * time.Second
		m.deaf = r.Float64() < 0.7
	default:
		m.takes = w.times(5 + 5*r.Float64())
		m.deaf = true
	}
	if retried > 0 {
		m.takes, m.deaf = min(m.takes, w.times(0.2)), false
	}
	switch p := r.Float64(); {
	case p < 0.14:
		m.act = failsFirst
	case p < 0.16:
		m.act = failsAlways
	case p < 0.18:
		m.act = givesUp
	case p < 0.22:
		m.act = panics
	case p < 0.23:
		m.act = vanishes
	case p < 0.33:
		m.act = checks
	case p < 0.37:
		m.act = releases
	case p < 0.39:
		m.act = pretends
	}
	return m
}

// times returns n TTLs.
func (w *world) times(n float64) time.Duration { return time.Duration(n * float64(w.ttl)) }

// between returns from a to b TTLs.
func (w *world) between(r *rand.Rand, a, b float64) time.Duration {
	return w.times(a + (b-a)*r.Float64())
}

// rand returns a source of its own for each thing that happens by itself.
func (w *world) rand(stream string) *rand.Rand { return rand.New(rand.NewPCG(w.seed, hash(stream))) }

func hash(text string) uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, text)
	return h.Sum64()
}

// produce enqueues bursts of copies, and single tasks, until the world's time is over.
func (w *world) produce() {
	r := w.rand("producer")
	for n := 0; w.Elapsed() < w.length; {
		time.Sleep(time.Duration(float64(w.length) / bursts * 2 * r.Float64()))
		k := w.kinds[r.IntN(len(w.kinds))]
		payload := fmt.Appendf(nil, `{"key":%d}`, r.IntN(w.keys))
		switch p := r.Float64(); {
		case p > 0.3:
		case k.name == "json":
			payload = []byte(`{"no key":0}`)
		case k.name == "free":
			payload = []byte(`{"free":true}`)
		}
		copies := 1
		if r.Float64() < 0.7 {
			copies += r.IntN(6)
		}
		for range copies {
			n++
			w.enqueue(r, k.name, payload, fmt.Sprintf("t%04d", n))
		}
	}
}

func (w *world) enqueue(r *rand.Rand, taskType string, payload []byte, id string) {
	opts := []asynq.Option{asynq.TaskID(id)}
	switch p := r.Float64(); {
	case p < 0.15:
		opts = append(opts, asynq.Timeout(max(w.between(r, 0.3, 1.5), time.Second)))
	case p < 0.3:
		opts = append(opts, asynq.Deadline(time.Now().Add(max(w.between(r, 0.5, 3), 1500*time.Millisecond))))
	default:
		opts = append(opts, asynq.Timeout(max(w.times(6), 4*time.Minute)))
	}
	switch p := r.Float64(); {
	case p < w.lastShare:
		opts = append(opts, asynq.MaxRetry(0))
	case p < 2*w.lastShare:
		opts = append(opts, asynq.MaxRetry(1))
	default:
		opts = append(opts, asynq.MaxRetry(4))
	}
	if r.Float64() < 0.2 {
		opts = append(opts, asynq.ProcessIn(w.between(r, 0, 3)))
	}
	w.Enqueue(asynq.NewTask(taskType, payload), opts...)
	w.enqueued(id)
}
