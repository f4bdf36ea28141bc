package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"example.com/redislock/faults/history"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// terms are those of every campaign. A quarter of a second is what a machine that is busy with all of it may be late by.
var terms = history.Terms{TTL: ttl, Slack: 250 * time.Millisecond, MayDrop: mayDrop}

// params are what the campaigns of one command have in common.
type params struct {
	server   string // program
	seed     uint64
	duration time.Duration
	cycles   int           // go on after duration until that many locks have ended, and each fault was done; 0: don't
	drain    time.Duration // for the queue to empty after the faults
	workers  int
	keys     int
	rate     int  // tasks a second
	short    bool // faults come more often
	again    bool // nothing is run: the histories are there
}

// campaign runs workers under the faults of one class and keeps their histories.
type campaign struct {
	params
	class class
	dir   string

	version     string                 // of the servers
	locks       atomic.Pointer[server] // the one that the workers talk to
	serverFault sync.Mutex             // held by what is done to the lock's server
	replica     *server                // guarded by serverFault; nil where the class needs none
	queue       *server
	servers     []*server
	slots       []*slot
	excess      excess
	history     *history.Writer
	order       history.Linearizability // what check found
}

// longest is how long a campaign goes on for its cycles.
const longest = 10 * time.Minute

// slot is the place of one worker: proxies that stay, and one process after the other.
type slot struct {
	name  string
	proxy *proxy // to the locks
	queue *proxy // to the queue; nil where the class leaves that alone

	mu      sync.Mutex // held by what takes the process away
	process *process
	current string // the process's name
	started int

	network      sync.Mutex // held by what is done to proxy
	queueNetwork sync.Mutex // held by what is done to queue, or needs it whole
}

// run returns the whole history. Whatever happens, every process it has started has ended then.
func (c *campaign) run(ctx context.Context) (records []history.Record, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, dir := range []string{"flock", "fenced"} {
		if err := os.MkdirAll(filepath.Join(c.dir, dir), 0o700); err != nil {
			return nil, err
		}
	}
	if c.history, err = history.Create(c.dir, "rig"); err != nil {
		return nil, err
	}
	defer c.stopServers()
	if err := c.startServers(ctx); err != nil {
		return nil, err
	}
	defer c.closeProxies()
	defer c.killWorkers()
	for i := range c.workers {
		s := &slot{name: fmt.Sprint("w", i)}
		c.slots = append(c.slots, s)
		var swallowed func(verb, bool)
		if c.class.swallows() {
			swallowed = c.noteSwallowed(s.name)
		}
		if s.proxy, err = newProxy(c.locks.Load().addr, swallowed); err != nil {
			return nil, err
		}
		if c.class.queue {
			if s.queue, err = newProxy(c.queue.addr, nil); err != nil {
				return nil, err
			}
		}
		if err := c.startWorker(s); err != nil {
			return nil, err
		}
	}

	var wg sync.WaitGroup
	wg.Go(func() { watchStalls(ctx, c.history) })
	wg.Go(func() { c.watchKeys(ctx) })
	plan, work, stopWork := c.plan(ctx)
	defer stopWork()
	var produceErr, countErr error
	wg.Go(func() { produceErr = c.produce(work) })
	wg.Go(func() {
		defer stopWork()
		countErr = c.awaitEnough(work)
	})
	faultErr := c.breakThings(work, plan)
	<-work.Done()
	c.awaitEmptyQueue(ctx)
	c.stopWorkers()
	sleep(ctx, ttl+ttl/4+c.excess.now())
	cancelled := ctx.Err()
	if cancelled == nil {
		c.inspectKeys(ctx)
	}
	cancel()
	wg.Wait()
	if err := errors.Join(cancelled, produceErr, countErr, faultErr); err != nil {
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

// startServers starts one for the locks, one for the queue, which stays whole, so that each task lost is the lock's fault, and
// where the class needs one, a replica for the locks.
func (c *campaign) startServers(ctx context.Context) error {
	args := []string{"--appendonly", "no", "--repl-diskless-sync-delay", "0"}
	if c.class.aof {
		args = []string{"--appendonly", "yes", "--appendfsync", "always"}
	}
	start := func(name string, args ...string) (*server, error) {
		s, err := startServer(ctx, c.server, filepath.Join(c.dir, name), args...)
		if err == nil {
			c.servers = append(c.servers, s)
		}
		return s, err
	}
	locks, err := start("locks", args...)
	if err != nil {
		return err
	}
	c.locks.Store(locks)
	if c.version, err = locks.version(ctx); err != nil {
		return err
	}
	if c.class.replica {
		if c.replica, err = start("replica", args...); err != nil {
			return err
		}
		if err := c.replica.replicaOf(ctx, locks); err != nil {
			return err
		}
	}
	c.queue, err = start("queue")
	return err
}

func (c *campaign) stopServers() {
	for _, s := range c.servers {
		s.stop()
	}
}

func (c *campaign) closeProxies() {
	for _, s := range c.slots {
		for _, p := range []*proxy{s.proxy, s.queue} {
			if p != nil {
				p.close()
			}
		}
	}
}

// plan returns what is to be done, and the time for it.
func (c *campaign) plan(ctx context.Context) ([]step, context.Context, context.CancelFunc) {
	duration := max(c.duration, c.class.least)
	if c.cycles > 0 {
		duration = max(duration, longest)
	}
	work, stop := context.WithTimeout(ctx, duration)
	return schedule(c.class, c.seed, c.workers, duration), work, stop
}

// checkEnough wants the campaign to have shown something.
func (c *campaign) checkEnough(f *history.Findings) {
	if f.Cycles < max(c.cycles, 1) {
		f.Add(history.BadHistory, "%d lock cycles are not enough", f.Cycles)
	}
	if c.class.every > 0 && len(c.class.missing(f.Faults)) == len(c.class.missing(nil)) {
		f.Add(history.BadHistory, "no fault was done")
	}
	if c.order.Unknown*20 > c.order.Pieces {
		f.Add(history.BadHistory, "%d of %d pieces were given up by the model", c.order.Unknown, c.order.Pieces)
	}
	for _, excuse := range slices.Sorted(maps.Keys(f.Excused)) {
		if !c.class.allows(excuse) {
			f.Add(history.BadOverlap, "%d excused by %q, which the class does not allow", f.Excused[excuse], excuse)
		}
	}
}

// awaitEnough waits for the campaign's duration and its cycles, and until each fault was done.
func (c *campaign) awaitEnough(ctx context.Context) error {
	if !sleep(ctx, max(c.duration, c.class.least)) {
		return nil
	}
	seen := progress{dir: c.dir}
	for c.cycles > 0 {
		if err := seen.update(); err != nil {
			return err
		}
		if seen.cycles >= c.cycles && len(c.class.missing(seen.faults)) == 0 || !sleep(ctx, time.Second) {
			return nil
		}
	}
	return nil
}

// startWorker is called with s.mu held, or before anybody else knows s.
func (c *campaign) startWorker(s *slot) error {
	s.started++
	s.current = fmt.Sprintf("%s-%d", s.name, s.started)
	w := workerConfig{
		Process: s.current, Dir: c.dir, LockAddr: s.proxy.addr, Queue: c.queue.addr, Seed: c.seed, Deaf: c.class.deaf, Grace: grace + 2*c.class.linger,
	}
	if s.queue != nil {
		w.Queue = s.queue.addr
	}
	if s == c.slots[0] {
		w.Linger = c.class.linger
	}
	config, err := json.Marshal(w)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p, err := start(c.dir, []string{workerEnv + "=" + string(config)}, self)
	if err == nil {
		s.process = p // or it stays the one that has ended
	}
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
			if err := s.process.failed(syscall.SIGTERM); err != nil { // SIGTERM itself ends one that does not listen yet
				c.history.Add(history.Record{Kind: history.KindDied, Process: s.current, Err: fmt.Sprintf("%v: %s", err, s.process.output.String())})
			}
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
				opts := []asynq.Option{asynq.TaskID(id), asynq.Timeout(taskTimeout + 2*c.class.linger)}
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
	queued, err := history.Queued(inspector, "default")
	for _, r := range queued {
		c.history.Add(r)
	}
	return err
}

// lockKeys returns the keys of all locks, markers and fence counters, with their values and TTLs.
func (c *campaign) lockKeys(ctx context.Context) (keys []lockKey, err error) {
	rdb := c.locks.Load().client
	names, err := rdb.Keys(ctx, lockPrefix+"*").Result() // a few hundred
	if err != nil {
		return nil, err
	}
	pipe := rdb.Pipeline()
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

func (k lockKey) done() bool    { return strings.Contains(k.value, `"done":true`) }
func (k lockKey) counter() bool { return strings.HasSuffix(k.name, ":fence") }

// most is the longest TTL that the key may have.
func (k lockKey) most() time.Duration {
	switch {
	case k.counter():
		return 24*time.Hour + time.Minute // a jump of the clock stays with it
	case k.done():
		return doneFor
	}
	return ttl
}

// watchKeys looks for keys that would never lapse, or not in time.
func (c *campaign) watchKeys(ctx context.Context) {
	for sleep(ctx, 100*time.Millisecond) {
		began := history.Now()
		c.excess.mu.Lock() // no jump while it looks
		excess := c.excess.left()
		keys, err := c.lockKeys(ctx)
		c.excess.mu.Unlock()
		if now := history.Now(); now-began > int64(stallMin) { // Redis was slow, for whichever reason
			c.history.Add(history.Record{Kind: history.KindStall, T: began, Until: now})
		}
		if err != nil {
			continue // the server is down
		}
		for _, k := range keys {
			// Redis answers -2 for a key that lapsed between the two commands, and go-redis leaves that in nanoseconds.
			if k.ttl == -1 || k.ttl > k.most()+excess {
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
		if !k.done() && !k.counter() {
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
