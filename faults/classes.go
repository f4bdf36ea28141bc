package main

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"example.com/redislock/faults/history"
)

// class is a kind of trouble, and what the lock promises under it.
type class struct {
	name    string
	promise promise
	every   time.Duration // between two faults, on average; 0: none
	faults  []string      // one of them each time
	aof     bool          // the lock's server writes each change to disk
	replica bool          // the lock's server has a replica
	queue   bool          // asynq's own connections have a proxy as well
	deaf    float64       // share of the long handlers that ignore their context
	least   time.Duration // a campaign that is shorter shows nothing
	linger  time.Duration // how long handlers of the first worker may go on, deaf; 0: like all others
}

// promise is what a lock keeps to in a class, in words.
type promise string

const (
	exclusive  promise = "no overlap"
	allowLoss  promise = "overlap only after the loss, and the first is told within TTL/3"
	allowPause promise = "overlap only by the paused process, until it is told"
	allowDeaf  promise = "overlap only by a handler that was told and went on"
	allowLapse promise = "overlap only after the jump made a lock lapse, and the first is told within TTL/3"
	allowMixed promise = "overlap only after a loss or a pause, or by a handler that was told and went on"
)

// excuses are those that a promise allows for an overlap, beside what may happen anywhere.
var excuses = map[promise][]string{
	allowLoss:  {history.ExcuseLoss},
	allowPause: {history.ExcusePause},
	allowDeaf:  {history.ExcuseDeaf},
	allowLapse: {history.ExcuseLoss},
	allowMixed: {history.ExcuseLoss, history.ExcusePause, history.ExcuseDeaf},
}

// The faults that only the campaign reads; the package history names the others.
const (
	faultKill          = "kill worker"
	faultShutdown      = "shut worker down"
	faultCut           = "cut"
	faultRefuse        = "refuse"
	faultResetUp       = "reset, request lost"
	faultResetDown     = "reset, reply lost"
	faultHangUp        = "half-open, requests lost"
	faultHangDown      = "half-open, replies lost"
	faultHang          = "hang" // what hung arrives in the end
	faultLatency       = "latency"
	faultThrottle      = "throttle"
	faultDurable       = "kill redis with aof"
	faultDown          = "redis down"
	faultScripts       = history.FaultOther + "script flush"
	faultClientPause   = "client pause"
	faultFull          = "out of memory"
	faultReadOnly      = "read-only replica"
	faultMasterDown    = "replica without its master"
	faultNoReplicas    = "too few replicas"
	faultLease         = history.FaultQueue + "leases expired"
	faultLoseAcquire   = history.FaultSwallow + string(verbAcquire)
	faultLoseExtend    = history.FaultSwallow + string(verbExtend)
	faultLoseRelease   = history.FaultSwallow + string(verbRelease)
	faultHushAcquire   = history.FaultOneReply + " " + faultLoseAcquire
	faultHushExtend    = history.FaultOneReply + " " + faultLoseExtend
	faultHushRelease   = history.FaultOneReply + " " + faultLoseRelease
	faultSwallowWindow = time.Second // how long a swallowed reply can keep a worker from Redis
)

var classes = []class{
	{name: "none", promise: exclusive},
	{name: "worker-kill", promise: exclusive, every: 600 * time.Millisecond, faults: []string{faultKill}},
	{name: "worker-pause", promise: allowPause, every: 900 * time.Millisecond, faults: []string{history.FaultPause}},
	{name: "cut", promise: exclusive, every: 150 * time.Millisecond, faults: []string{faultCut, faultCut, faultCut, faultRefuse, faultResetUp, faultResetDown}},
	{name: "half-open", promise: exclusive, every: 600 * time.Millisecond, faults: []string{faultHangUp, faultHangDown, faultHang}},
	{name: "latency", promise: exclusive, every: 500 * time.Millisecond, faults: []string{faultLatency}},
	{name: "throttle", promise: exclusive, every: 800 * time.Millisecond, faults: []string{faultThrottle}},
	{name: "swallow-acquire", promise: exclusive, every: 25 * time.Millisecond, faults: []string{faultLoseAcquire, faultLoseAcquire, faultHushAcquire}},
	{name: "swallow-extend", promise: exclusive, every: 25 * time.Millisecond, faults: []string{faultLoseExtend, faultHushExtend}},
	{name: "swallow-release", promise: exclusive, every: 25 * time.Millisecond, faults: []string{faultLoseRelease, faultLoseRelease, faultHushRelease}},
	{name: "redis-kill-aof", promise: exclusive, every: 4 * time.Second, faults: []string{faultDurable}, aof: true},
	{name: "redis-kill", promise: allowLoss, every: 4 * time.Second, faults: []string{history.FaultLossy}},
	{name: "script-flush", promise: exclusive, every: 20 * time.Millisecond, faults: []string{faultScripts}},
	{name: "flushall", promise: allowLoss, every: 300 * time.Millisecond, faults: []string{history.FaultFlush}},
	{name: "key-deleted", promise: allowLoss, every: 30 * time.Millisecond, faults: []string{history.FaultDelete}},
	{name: "key-stolen", promise: allowLoss, every: 60 * time.Millisecond, faults: []string{history.FaultSteal}},
	{name: "client-pause", promise: exclusive, every: 3 * time.Second, faults: []string{faultClientPause}},
	{name: "maxmemory-noeviction", promise: exclusive, every: time.Second, faults: []string{faultFull}},
	{name: "maxmemory-lru", promise: allowLoss, every: 2 * time.Second, faults: []string{history.FaultPressure}},
	{name: "read-only", promise: exclusive, every: 2 * time.Second, faults: []string{faultReadOnly, faultMasterDown, faultNoReplicas}},
	{name: "failover", promise: allowLoss, every: 2 * time.Second, faults: []string{history.FaultFailover}, replica: true},
	{name: "clock-jump", promise: allowLapse, every: 300 * time.Millisecond, faults: []string{history.FaultForward, history.FaultBackward}},
	{name: "queue-cut", promise: exclusive, every: 150 * time.Millisecond, queue: true,
		faults: []string{history.FaultQueue + faultCut, history.FaultQueue + faultRefuse, history.FaultQueue + faultHang, history.FaultQueue + faultResetDown}},
	{name: "lease-early", promise: allowDeaf, every: time.Second, faults: []string{faultLease}, deaf: 0.3},
	{name: "lease-expiry", promise: allowDeaf, every: 5 * time.Second, faults: []string{faultShutdown}, queue: true, least: leaseHang + 15*time.Second, linger: leaseHang},
	{name: "deaf", promise: allowDeaf, every: 700 * time.Millisecond, faults: []string{faultHang, faultRefuse}, deaf: 0.5},
	{name: "shutdown", promise: allowDeaf, every: 700 * time.Millisecond, faults: []string{faultShutdown}, deaf: 0.3},
	{name: "mixed", promise: allowMixed, every: 250 * time.Millisecond, replica: true, queue: true, deaf: 0.2, faults: []string{
		faultKill, history.FaultPause, faultShutdown, faultCut, faultRefuse, faultResetUp, faultResetDown, faultHangUp, faultHangDown, faultHang,
		faultLatency, faultThrottle, faultLoseAcquire, faultLoseExtend, faultLoseRelease, faultHushAcquire, faultHushExtend, faultHushRelease,
		history.FaultLossy, faultScripts, history.FaultFlush, history.FaultDelete, history.FaultSteal, faultClientPause,
		faultFull, history.FaultPressure, faultReadOnly, faultMasterDown, faultNoReplicas, history.FaultFailover, history.FaultForward, history.FaultBackward,
		history.FaultQueue + faultCut, history.FaultQueue + faultHang, faultLease,
	}},
}

// A lease of asynq lasts 30 s. A recoverer takes the task over once it has been expired for another 30 s; each worker looks
// when it starts and every minute.
const (
	leaseHang  = 70 * time.Second
	leaseStart = 5 * time.Second // the hang's, from the beginning of the campaign
)

// allows reports whether the class's promise lets an overlap be excused so.
func (c class) allows(excuse string) bool {
	anywhere := []string{history.ExcuseStall, history.ExcuseOpen, history.ExcuseKilled}
	return slices.Contains(anywhere, excuse) || slices.Contains(excuses[c.promise], excuse)
}

// swallows reports whether the class needs a proxy that tells commands apart.
func (c class) swallows() bool {
	return slices.ContainsFunc(c.faults, func(fault string) bool { return strings.Contains(fault, history.FaultSwallow) })
}

// missing returns the faults of the class that have not been done.
func (c class) missing(done map[string]int) (names []string) {
	for _, name := range c.faults {
		if done[name] == 0 && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// step is one fault of a schedule.
type step struct {
	at     time.Duration // from the start of the campaign
	fault  string
	worker int
	lasts  time.Duration
	pick   float64 // which key, by its place among those that are there, or how strong
}

// schedule plans the faults of a campaign. Equal arguments make equal plans, and a longer one begins like a shorter one.
func schedule(c class, seed uint64, workers int, duration time.Duration) (plan []step) {
	if c.linger > 0 && leaseStart+leaseHang < duration {
		plan = append(plan, step{at: leaseStart, fault: history.FaultQueue + faultHang, lasts: leaseHang})
	}
	if c.every == 0 {
		return plan
	}
	r := rand.New(rand.NewPCG(seed, 1))
	between := func(low, high time.Duration) time.Duration { return low + time.Duration(r.Int64N(int64(high-low))) }
	for at := time.Second; ; {
		at += between(c.every/2, c.every*3/2)
		s := step{at: at, fault: c.faults[r.IntN(len(c.faults))], worker: r.IntN(workers), pick: r.Float64()}
		switch s.fault {
		case history.FaultPause:
			s.lasts = between(ttl+ttl/5, 5*ttl/2)
		case faultKill, faultShutdown, faultLease:
			s.lasts = between(50*time.Millisecond, 500*time.Millisecond) // until it is started again
		case history.FaultLossy, faultDurable, history.FaultFailover:
			s.lasts = between(0, 3*ttl/2)
		case faultCut, history.FaultQueue + faultCut:
		case faultClientPause:
			s.lasts = between(ttl/10, 3*ttl/2)
		case faultReadOnly, faultMasterDown, faultNoReplicas, faultFull, history.FaultPressure:
			s.lasts = between(ttl/5, 2*ttl)
		case history.FaultForward, history.FaultBackward:
			s.lasts = 0
		default:
			s.lasts = between(ttl/5, 3*ttl)
		}
		if at >= duration {
			break
		}
		s.lasts = min(s.lasts, duration-at)
		plan = append(plan, s)
	}
	slices.SortStableFunc(plan, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	return plan
}
