package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"example.com/redislock/faults/history"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// terms are those of every campaign. A quarter of a second is what a machine that is busy with all of it may be late by.
var terms = history.Terms{TTL: ttl, Slack: 250 * time.Millisecond}

// campaign runs workers under the faults of one class and keeps their histories.
type campaign struct {
	class    class
	server   string // program
	dir      string
	seed     uint64
	duration time.Duration
	drain    time.Duration // for the queue to empty after the faults
	workers  int
	keys     int
	rate     int // tasks a second

	locks   *server
	queue   *server
	slots   []*slot
	history *history.Writer
}

// slot is the place of one worker: a proxy that stays, and one process after the other.
type slot struct {
	name  string
	proxy *proxy

	mu      sync.Mutex // held by what takes the process away
	process *process
	current string // the process's name
	started int

	network sync.Mutex // held by what is done to the proxy
}

// run returns the whole history. Whatever happens, every process it has started has ended then.
func (c *campaign) run(ctx context.Context) (records []history.Record, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := os.MkdirAll(filepath.Join(c.dir, "flock"), 0o700); err != nil {
		return nil, err
	}
	if c.history, err = history.Create(c.dir, "rig"); err != nil {
		return nil, err
	}
	args := []string{"--appendonly", "no"}
	if c.class.aof {
		args = []string{"--appendonly", "yes", "--appendfsync", "always"}
	}
	if c.locks, err = startServer(ctx, c.server, filepath.Join(c.dir, "locks"), args...); err != nil {
		return nil, err
	}
	defer c.locks.stop()
	// The queue has a server of its own that stays whole, so that each task lost is the lock's fault.
	if c.queue, err = startServer(ctx, c.server, filepath.Join(c.dir, "queue")); err != nil {
		return nil, err
	}
	defer c.queue.stop()
	defer func() {
		for _, s := range c.slots {
			s.proxy.close()
		}
	}()
	defer c.killWorkers()
	for i := range c.workers {
		p, err := newProxy(c.locks.addr)
		if err != nil {
			return nil, err
		}
		s := &slot{name: fmt.Sprint("w", i), proxy: p}
		c.slots = append(c.slots, s)
		if err := c.startWorker(s); err != nil {
			return nil, err
		}
	}

	var wg sync.WaitGroup
	wg.Go(func() { c.watchKeys(ctx) })
	work, stopWork := context.WithTimeout(ctx, c.duration)
	defer stopWork()
	var produceErr error
	wg.Go(func() { produceErr = c.produce(work) })
	faultErr := c.breakThings(work)
	<-work.Done()
	c.awaitEmptyQueue(ctx)
	c.stopWorkers()
	sleep(ctx, ttl+ttl/4)
	cancelled := ctx.Err()
	if cancelled == nil {
		c.inspectKeys(ctx)
	}
	cancel()
	wg.Wait()
	if err := errors.Join(cancelled, produceErr, faultErr); err != nil {
		return nil, err
	}
	if err := c.inspectQueue(); err != nil {
		return nil, err
	}
	if err := c.history.Close(); err != nil {
		return nil, err
	}
	return history.ReadDir(c.dir)
}

// startWorker is called with s.mu held, or before anybody else knows s.
func (c *campaign) startWorker(s *slot) error {
	s.started++
	s.current = fmt.Sprintf("%s-%d", s.name, s.started)
	config, err := json.Marshal(workerConfig{
		Process: s.current, Dir: c.dir, LockAddr: s.proxy.addr, Queue: c.queue.addr, Seed: c.seed, Deaf: c.class.deaf,
	})
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	s.process, err = start(c.dir, []string{workerEnv + "=" + string(config)}, self)
	return err
}

// end ends the worker's process, by force or in order, and notes one that had ended by itself. s.mu is held.
func (c *campaign) end(s *slot, force bool) {
	defer func() { c.history.Add(history.Record{Kind: history.KindGone, Process: s.current}) }()
	if s.process.ended() {
		c.history.Add(history.Record{Kind: history.KindDied, Process: s.current, Err: s.process.output.String()})
		return
	}
	if !force {
		s.process.signal(syscall.SIGTERM)
		if s.process.waitFor(shutdownTimeout + patience + 10*time.Second) {
			return
		}
	}
	if force {
		c.history.Add(history.Record{Kind: history.KindKilled, Process: s.current})
	} else {
		c.history.Add(history.Record{Kind: history.KindDied, Process: s.current, Err: "it did not end when told to, and was killed"})
	}
	s.process.kill()
}

func (c *campaign) stopWorkers() {
	var wg sync.WaitGroup
	for _, s := range c.slots {
		wg.Go(func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			c.end(s, false)
		})
	}
	wg.Wait()
}

// killWorkers is for the end of a campaign that failed. Those that have ended already don't mind.
func (c *campaign) killWorkers() {
	for _, s := range c.slots {
		s.mu.Lock()
		if s.process != nil {
			s.process.kill()
		}
		s.mu.Unlock()
	}
}

// produce enqueues bursts of duplicates.
func (c *campaign) produce(ctx context.Context) error {
	client := asynq.NewClient(asynq.RedisClientOpt{Addr: c.queue.addr})
	defer client.Close()
	r := rand.New(rand.NewPCG(c.seed, 2))
	began := time.Now()
	for n := 0; sleep(ctx, 10*time.Millisecond); {
		waiting, err := c.queue.client.LLen(ctx, "asynq:{default}:pending").Result()
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("look at the queue: %w", err)
		}
		if waiting > 300 {
			continue
		}
		for due := int(time.Since(began).Seconds() * float64(c.rate)); n < due && ctx.Err() == nil; {
			key := r.IntN(c.keys)
			for range 1 + r.IntN(4) {
				n++
				id := fmt.Sprintf("t%06d", n)
				opts := []asynq.Option{asynq.TaskID(id), asynq.Timeout(taskTimeout)}
				if r.Float64() < 0.02 {
					opts = append(opts, asynq.MaxRetry(0)) // its first attempt is its last
				}
				task := asynq.NewTask(kindOfKey(key), fmt.Appendf(nil, `{"key":%d}`, key), opts...)
				if _, err := client.Enqueue(task); err != nil {
					return fmt.Errorf("enqueue: %w", err)
				}
				c.history.Add(history.Record{Kind: history.KindEnqueued, Task: id})
			}
			if due-n > c.rate { // it was held up by a full queue: no flood afterwards
				began = began.Add(time.Second)
				due = n
			}
		}
	}
	return nil
}

// awaitEmptyQueue waits until no task is left that a living worker could do.
func (c *campaign) awaitEmptyQueue(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, c.drain)
	defer cancel()
	for sleep(ctx, 100*time.Millisecond) {
		pipe := c.queue.client.Pipeline()
		pending := pipe.LLen(ctx, "asynq:{default}:pending")
		retry := pipe.ZCard(ctx, "asynq:{default}:retry")
		if _, err := pipe.Exec(ctx); err == nil && pending.Val()+retry.Val() == 0 {
			return
		}
	}
}

// inspectQueue notes every task that the queue still has.
func (c *campaign) inspectQueue() error {
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: c.queue.addr})
	defer inspector.Close()
	for state, list := range map[string]func(string, ...asynq.ListOption) ([]*asynq.TaskInfo, error){
		"pending":   inspector.ListPendingTasks,
		"active":    inspector.ListActiveTasks,
		"scheduled": inspector.ListScheduledTasks,
		"retry":     inspector.ListRetryTasks,
		"archived":  inspector.ListArchivedTasks,
	} {
		const size = 1000
		for page, full := 1, true; full; page++ {
			tasks, err := list("default", asynq.Page(page), asynq.PageSize(size))
			if errors.Is(err, asynq.ErrQueueNotFound) {
				break
			}
			if err != nil {
				return fmt.Errorf("list %s tasks: %w", state, err)
			}
			for _, task := range tasks {
				c.history.Add(history.Record{Kind: history.KindQueued, Task: task.ID, State: state, Err: task.LastErr})
			}
			full = len(tasks) == size
		}
	}
	return nil
}

// lockKeys returns the keys of all locks and markers, with their values and TTLs.
func (c *campaign) lockKeys(ctx context.Context) (keys []lockKey, err error) {
	names, err := c.locks.client.Keys(ctx, "redislock:*").Result() // a few dozen
	if err != nil {
		return nil, err
	}
	pipe := c.locks.client.Pipeline()
	values, ttls := make([]*redis.StringCmd, len(names)), make([]*redis.DurationCmd, len(names))
	for i, name := range names {
		values[i], ttls[i] = pipe.Get(ctx, name), pipe.PTTL(ctx, name)
	}
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return nil, err
	}
	for i, name := range names {
		if values[i].Err() == nil && ttls[i].Err() == nil {
			keys = append(keys, lockKey{name, values[i].Val(), ttls[i].Val()})
		}
	}
	return keys, nil
}

type lockKey struct {
	name, value string
	ttl         time.Duration
}

func (k lockKey) done() bool { return strings.Contains(k.value, `"done":true`) }

// watchKeys looks for keys that would never lapse, or not in time.
func (c *campaign) watchKeys(ctx context.Context) {
	for sleep(ctx, 100*time.Millisecond) {
		keys, err := c.lockKeys(ctx)
		if err != nil {
			continue // the server is down
		}
		for _, k := range keys {
			// Redis answers -2 for a key that lapsed between the two commands, and go-redis leaves that in nanoseconds.
			if k.ttl == -1 || !k.done() && k.ttl > ttl || k.ttl > doneFor {
				c.history.Add(history.Record{Kind: history.KindImmortal, Key: k.name, Err: fmt.Sprintf("TTL %v: %s", k.ttl, k.value)})
			}
		}
	}
}

// inspectKeys looks for locks that are still there more than a TTL after the last worker has ended.
func (c *campaign) inspectKeys(ctx context.Context) {
	keys, err := c.lockKeys(ctx)
	if err != nil {
		c.history.Add(history.Record{Kind: history.KindDied, Process: "redis", Err: err.Error()})
	}
	for _, k := range keys {
		if !k.done() {
			c.history.Add(history.Record{Kind: history.KindLeftover, Key: k.name, Err: k.value})
		}
	}
}

// sleep reports whether it has slept to the end.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
