package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"example.com/redislock/faults/history"
	"github.com/redis/go-redis/v9"
)

// breakThings does what the schedule says and heals it all before it returns.
func (c *campaign) breakThings(ctx context.Context, plan []step) error {
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		fatal []error
		began = time.Now()
	)
	for _, s := range plan {
		if !sleep(ctx, time.Until(began.Add(s.at))) {
			break
		}
		wg.Go(func() {
			if err := c.do(ctx, s); err != nil {
				mu.Lock()
				defer mu.Unlock()
				fatal = append(fatal, fmt.Errorf("%s at %v: %w", s.fault, s.at, err))
			}
		})
	}
	wg.Wait()
	return errors.Join(fatal...)
}

// do does one fault, from its beginning to its end. A fault that finds its worker, network or server in the hands of
// another one is left out.
func (c *campaign) do(ctx context.Context, s step) error {
	w := c.slots[s.worker]
	switch s.fault {
	case faultKill, faultShutdown, faultLease:
		return c.restart(ctx, s, w)
	case history.FaultPause:
		c.pause(ctx, s, w)
		return nil
	case faultLoseAcquire, faultLoseExtend, faultLoseRelease, faultHushAcquire, faultHushExtend, faultHushRelease:
		_, verbName, _ := strings.Cut(s.fault, history.FaultSwallow)
		w.proxy.hop.swallow(verb(verbName), strings.HasPrefix(s.fault, history.FaultOneReply))
		return nil // noteSwallowed tells of it
	}
	if t, ok := troubleOf(s); ok {
		if strings.HasPrefix(s.fault, history.FaultQueue) {
			return c.disturb(ctx, s, w.name, t, &w.queueNetwork, w.queue)
		}
		return c.disturb(ctx, s, w.name, t, &w.network, w.proxy)
	}
	if !c.serverFault.TryLock() {
		return nil
	}
	defer c.serverFault.Unlock()
	switch s.fault {
	case history.FaultLossy, faultDurable:
		return c.crash(ctx, s)
	case history.FaultFailover:
		return c.failOver(ctx, s)
	case history.FaultPressure:
		return c.press(ctx, s)
	default:
		return c.command(ctx, s)
	}
}

// note writes a fault down. One without an end ends now.
func (c *campaign) note(f history.Record) {
	f.Kind = history.KindFault
	if f.Until == 0 {
		f.Until = history.Now()
	}
	c.history.Add(f)
}

// noteSwallowed returns what the hop of a worker tells of the replies it has kept back.
func (c *campaign) noteSwallowed(worker string) func(v verb, silent bool) {
	return func(v verb, silent bool) {
		f := history.Record{Fault: history.FaultSwallow + string(v), Process: worker, T: history.Now()}
		if silent {
			f.Fault = history.FaultOneReply + " " + f.Fault
		}
		f.Until = f.T + int64(faultSwallowWindow)
		c.note(f)
	}
}

// restart ends a worker and starts it again. asynq looks for leases that have expired when it starts; with faultLease, it finds
// those of all tasks that are being worked on.
func (c *campaign) restart(ctx context.Context, s step, w *slot) error {
	if !w.mu.TryLock() {
		return nil
	}
	defer w.mu.Unlock()
	if !w.queueNetwork.TryLock() { // asynq cannot shut down without its server
		return nil
	}
	defer w.queueNetwork.Unlock()
	f := history.Record{Fault: s.fault, Process: w.name, T: history.Now()}
	c.end(w, s.fault == faultKill)
	if s.fault != faultLease {
		c.note(f)
	}
	sleep(ctx, s.lasts)
	if s.fault == faultLease {
		f.T = history.Now()
		if err := c.expireLeases(context.WithoutCancel(ctx)); err != nil {
			return err
		}
		c.note(f)
	}
	return c.startWorker(w)
}

// expireLeases makes every lease one that expired long ago. Workers extend theirs every 5 s.
func (c *campaign) expireLeases(ctx context.Context) error {
	const leases = "asynq:{default}:lease"
	tasks, err := c.queue.client.ZRange(ctx, leases, 0, -1).Result()
	if err != nil || len(tasks) == 0 {
		return err
	}
	long := make([]redis.Z, len(tasks))
	for i, task := range tasks {
		long[i] = redis.Z{Score: 1, Member: task}
	}
	return c.queue.client.ZAddXX(ctx, leases, long...).Err()
}

func (c *campaign) pause(ctx context.Context, s step, w *slot) {
	if !w.mu.TryLock() {
		return
	}
	defer w.mu.Unlock()
	f := history.Record{Fault: s.fault, Process: w.current, T: history.Now()}
	w.process.signal(syscall.SIGSTOP)
	sleep(ctx, s.lasts)
	w.process.signal(syscall.SIGCONT)
	c.note(f)
}

// disturb makes trouble in a worker's network.
func (c *campaign) disturb(ctx context.Context, s step, worker string, t trouble, free *sync.Mutex, p *proxy) error {
	if !free.TryLock() {
		return nil
	}
	defer free.Unlock()
	f := history.Record{Fault: s.fault, Process: worker, T: history.Now()}
	defer func() { c.note(f) }()
	if strings.TrimPrefix(s.fault, history.FaultQueue) == faultCut {
		return p.cut()
	}
	if err := p.set(t); err != nil {
		return err
	}
	sleep(ctx, s.lasts)
	return p.set(trouble{})
}

// troubleOf returns what a fault of the network is to its proxy.
func troubleOf(s step) (t trouble, ok bool) {
	switch strings.TrimPrefix(s.fault, history.FaultQueue) {
	case faultCut:
		return trouble{}, true
	case faultRefuse:
		return trouble{refuse: true}, true
	case faultResetUp: // before the server sees the request
		return trouble{toxics: []toxic{toxicOf(up, "reset_peer", nil)}}, true
	case faultResetDown: // after the server has done what it says
		return trouble{toxics: []toxic{toxicOf(down, "reset_peer", nil)}}, true
	case faultHangUp:
		return trouble{toxics: []toxic{toxicOf(up, "timeout", nil)}}, true
	case faultHangDown:
		return trouble{toxics: []toxic{toxicOf(down, "timeout", nil)}}, true
	case faultHang:
		return trouble{toxics: bothWays("latency", map[string]int64{"latency": time.Hour.Milliseconds()})}, true
	case faultLatency: // each way, so that some acquires take longer than a quarter of the TTL
		return trouble{toxics: bothWays("latency", map[string]int64{"latency": int64(s.pick * float64(ttl.Milliseconds()/4))})}, true
	case faultThrottle: // kB/s; an acquire has some 300 bytes
		return trouble{toxics: bothWays("bandwidth", map[string]int64{"rate": 1 + int64(s.pick*4)})}, true
	}
	return trouble{}, false
}

// crash kills the lock's server and starts it again.
func (c *campaign) crash(ctx context.Context, s step) error {
	locks := c.locks.Load()
	f := history.Record{Fault: s.fault, T: history.Now()}
	locks.process.kill()
	c.note(f) // what is lost is lost now
	sleep(ctx, s.lasts)
	err := locks.up(context.WithoutCancel(ctx))
	f.Fault = faultDown
	c.note(f)
	return err
}

// failOver cuts the replica off, waits, and leads all workers to it. The server they had becomes the replica.
func (c *campaign) failOver(ctx context.Context, s step) error {
	from, to := c.locks.Load(), c.replica
	for {
		info, err := to.client.Info(ctx, "replication").Result()
		if err == nil && strings.Contains(info, "master_link_status:up") {
			break
		}
		if !sleep(ctx, 50*time.Millisecond) {
			return nil
		}
	}
	ctx = context.WithoutCancel(ctx) // half a failover is a fault of the rig
	if err := to.replicaOf(ctx, nil); err != nil {
		return err
	}
	sleep(ctx, s.lasts)
	f := history.Record{Fault: s.fault, T: history.Now()}
	for _, w := range c.slots { // whatever else is done to them
		if err := w.proxy.retarget(to.addr); err != nil {
			return err
		}
	}
	c.note(f)
	c.locks.Store(to)
	c.replica = from
	return from.replicaOf(ctx, to)
}

// press makes Redis evict keys until s is over: it writes more than fits, again and again, next to the locks.
func (c *campaign) press(ctx context.Context, s step) (err error) {
	rdb := c.locks.Load().client
	alive := context.WithoutCancel(ctx)
	used, err := usedMemory(alive, rdb)
	if err != nil {
		return err
	}
	evictions := rdb.Subscribe(alive, "__keyevent@0__:evicted")
	defer evictions.Close()
	since, err := c.noteEvictions(alive, evictions, 0) // it listens now
	if err != nil {
		return err
	}
	f := history.Record{Fault: s.fault, T: history.Now()}
	err = configure(alive, rdb, [][2]string{{"notify-keyspace-events", "Ee"}, {"maxmemory-policy", "allkeys-lru"}, {"maxmemory-samples", "1"},
		{"maxmemory", fmt.Sprint(used + headroom)}})
	for end := time.Now().Add(s.lasts); err == nil && time.Now().Before(end) && sleep(ctx, 10*time.Millisecond); {
		for i := range ballastKeys {
			// An error is what a worker gets, too: there may be nothing left to evict.
			_ = rdb.Set(alive, ballastKey(i), strings.Repeat("x", ballastSize), time.Minute).Err()
		}
		since, err = c.noteEvictions(alive, evictions, since)
	}
	err = errors.Join(err, configure(alive, rdb, [][2]string{{"maxmemory", "0"}, {"maxmemory-policy", "noeviction"}}))
	if err == nil {
		_, err = c.noteEvictions(alive, evictions, since)
	}
	c.note(f)
	for i := range ballastKeys {
		err = errors.Join(err, rdb.Del(alive, ballastKey(i)).Err())
	}
	return errors.Join(err, configure(alive, rdb, [][2]string{{"notify-keyspace-events", ""}}))
}

// The ballast is a little more than what fits.
const (
	headroom    = 64 << 10
	ballastKeys = 12
	ballastSize = 8 << 10
)

func ballastKey(i int) string { return fmt.Sprint("ballast:", i) }

// noteEvictions writes down each lock that was evicted since then. Redis tells of what it did before a PING before it answers.
func (c *campaign) noteEvictions(ctx context.Context, evictions *redis.PubSub, since int64) (now int64, err error) {
	now = history.Now()
	if err := evictions.Ping(ctx); err != nil {
		return 0, fmt.Errorf("ask for evictions: %w", err)
	}
	for {
		message, err := evictions.ReceiveTimeout(ctx, 10*time.Second)
		if err != nil {
			return 0, fmt.Errorf("wait for evictions: %w", err)
		}
		switch m := message.(type) {
		case *redis.Pong:
			return now, nil
		case *redis.Message:
			if strings.HasPrefix(m.Payload, lockPrefix) { // and not our ballast
				c.note(history.Record{Fault: history.FaultEvict, Key: m.Payload, T: since})
			}
		}
	}
}

// command does what somebody does to Redis itself.
func (c *campaign) command(ctx context.Context, s step) error {
	rdb := c.locks.Load().client
	alive := context.WithoutCancel(ctx) // a fault that was begun is noted as it was, and healed
	f := history.Record{Fault: s.fault, T: history.Now()}
	var err error
	switch s.fault {
	case faultScripts:
		err = rdb.ScriptFlush(alive).Err()
	case history.FaultFlush:
		err = rdb.FlushAll(alive).Err()
	case faultClientPause:
		if err = rdb.Do(alive, "client", "pause", s.lasts.Milliseconds(), "all").Err(); err == nil {
			sleep(alive, s.lasts)
		}
	case faultFull:
		err = c.during(ctx, s, [2]string{"maxmemory", "1"}, [2]string{"maxmemory", "0"})
	case faultNoReplicas:
		err = c.during(ctx, s, [2]string{"min-replicas-to-write", "3"}, [2]string{"min-replicas-to-write", "0"})
	case faultReadOnly:
		err = c.subordinate(ctx, s)
	case faultMasterDown:
		if err = configure(alive, rdb, [][2]string{{"replica-serve-stale-data", "no"}}); err == nil {
			err = errors.Join(c.subordinate(ctx, s), configure(alive, rdb, [][2]string{{"replica-serve-stale-data", "yes"}}))
		}
	case history.FaultForward, history.FaultBackward:
		return c.jump(alive, s)
	case history.FaultDelete, history.FaultSteal:
		return c.takeKey(alive, s)
	default:
		err = errors.New("unknown fault")
	}
	c.note(f)
	return err
}

// takeKey deletes or steals one lock.
func (c *campaign) takeKey(ctx context.Context, s step) error {
	keys, err := c.lockKeys(ctx)
	if err != nil {
		return err
	}
	keys = slices.DeleteFunc(keys, func(k lockKey) bool { return k.done() || k.counter() })
	if len(keys) == 0 {
		return nil
	}
	rdb := c.locks.Load().client
	f := history.Record{Fault: s.fault, Key: keys[int(s.pick*float64(len(keys)))].name, T: history.Now()}
	defer func() { c.note(f) }()
	if s.fault == history.FaultDelete {
		return rdb.Del(ctx, f.Key).Err()
	}
	return rdb.Set(ctx, f.Key, `redislock/1 {"task_id":"thief","host":"elsewhere","pid":1,"since":"2025-01-01T00:00:00Z","token":"stolen"}`, ttl/2).Err()
}

// during changes a setting of the lock's server for a while.
func (c *campaign) during(ctx context.Context, s step, set, reset [2]string) error {
	rdb := c.locks.Load().client
	if err := configure(ctx, rdb, [][2]string{set}); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	sleep(ctx, s.lasts)
	return configure(context.WithoutCancel(ctx), rdb, [][2]string{reset})
}

// subordinate makes the lock's server the replica of a master that is not there for a while: it keeps its data.
func (c *campaign) subordinate(ctx context.Context, s step) error {
	locks, alive := c.locks.Load(), context.WithoutCancel(ctx)
	if err := locks.client.Do(alive, "replicaof", "127.0.0.1", "1").Err(); err != nil {
		return err
	}
	sleep(ctx, s.lasts)
	return locks.replicaOf(alive, nil)
}

// jumpScript does to the TTLs of all locks and markers what a jump of the server's clock by ARGV[1] ms does to keys that lapse at a
// fixed time. It returns those that lapsed at once, and those that lapse sooner than they would have.
var jumpScript = redis.NewScript(`
local lapsed, sooner = {}, {}
for _, key in ipairs(redis.call('keys', ARGV[2] .. '*')) do
  local ttl = redis.call('pttl', key)
  if ttl > 0 and ttl - ARGV[1] <= 0 then
    redis.call('del', key)
    table.insert(lapsed, key)
  elseif ttl > 0 then
    redis.call('pexpire', key, ttl - ARGV[1])
    table.insert(sooner, key)
  end
end
return {lapsed, sooner}`)

// jump lets the server's clock seem to jump by up to two TTLs.
func (c *campaign) jump(ctx context.Context, s step) error {
	by := time.Duration(s.pick * float64(2*ttl)).Truncate(time.Millisecond)
	f := history.Record{Fault: s.fault, T: history.Now()}
	if s.fault == history.FaultBackward {
		by = -by
	}
	var reply []any
	err := c.excess.add(-by, func() (err error) {
		reply, err = jumpScript.Run(ctx, c.locks.Load().client, nil, by.Milliseconds(), lockPrefix).Slice()
		return err
	})
	if err != nil {
		return err
	}
	c.note(f)
	if by < 0 {
		return nil
	}
	for i, kind := range []string{history.FaultLapse, history.FaultShorten} {
		keys, _ := reply[i].([]any)
		for _, key := range keys {
			f.Fault, f.Key = kind, fmt.Sprint(key)
			c.note(f)
		}
	}
	return nil
}

// excess is by how much keys may outlive their TTLs because the server's clock seemed to jump back.
type excess struct {
	mu    sync.Mutex
	until time.Time
}

// add does a jump back by d, or forward if d is negative, which takes back what others have added. Whoever asks meanwhile waits.
func (e *excess) add(d time.Duration, jump func() error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := jump()
	e.until = time.Now().Add(max(e.left()+d, 0))
	return err
}

func (e *excess) now() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.left()
}

// left is called with e.mu held.
func (e *excess) left() time.Duration { return max(time.Until(e.until), 0) }

func configure(ctx context.Context, rdb *redis.Client, settings [][2]string) error {
	for _, s := range settings {
		if err := rdb.ConfigSet(ctx, s[0], s[1]).Err(); err != nil {
			return fmt.Errorf("set %s: %w", s[0], err)
		}
	}
	return nil
}

func usedMemory(ctx context.Context, rdb *redis.Client) (n int64, err error) {
	info, err := rdb.Info(ctx, "memory").Result()
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(info, "used_memory:")
	if _, err := fmt.Sscan(after, &n); err != nil {
		return 0, fmt.Errorf("read used_memory: %w", err)
	}
	return n, nil
}
