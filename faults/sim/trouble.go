package sim

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"example.com/redislock/faults/history"
	"example.com/redislock/internal/virtual"
)

// trouble is something that goes wrong for a while, once in a while.
type trouble struct {
	name   string
	weight int
	do     func(w *world, h *host, r *rand.Rand, name string)
}

// trouble lets one of the troubles happen every n TTLs, and then mends what it broke.
func (w *world) trouble(r *rand.Rand, of []trouble, h *host, n float64, mend func()) {
	total := 0
	for _, t := range of {
		total += t.weight
	}
	for w.gap(r, n) {
		i := r.IntN(total)
		for _, t := range of {
			if i -= t.weight; i < 0 {
				t.do(w, h, r, t.name)
				break
			}
		}
		if mend != nil {
			mend()
		}
	}
}

// Every lock command has each of these done to it.
var verbs = []string{"acquire", "extend", "release", "done"}

var verbFaults = []struct {
	name string
	do   func(f *virtual.Fault, d time.Duration)
}{
	{"lose request of ", func(f *virtual.Fault, _ time.Duration) { f.LoseRequest() }},
	{"lose reply to ", func(f *virtual.Fault, _ time.Duration) { f.LoseReply() }},
	{"swallow request of ", func(f *virtual.Fault, _ time.Duration) { f.SwallowRequest() }},
	{history.FaultSwallow, func(f *virtual.Fault, _ time.Duration) { f.SwallowReply() }},
	{"delay ", func(f *virtual.Fault, d time.Duration) { f.Delay(d) }},
	{"delay reply to ", func(f *virtual.Fault, d time.Duration) { f.DelayReply(d) }},
}

var lockTroubles = append([]trouble{
	{"cut", 6, func(w *world, h *host, r *rand.Rand, name string) {
		h.LockLink.Cut()
		w.last(r, h, name, 0.05, 2)
	}},
	{"hang", 4, func(w *world, h *host, r *rand.Rand, name string) {
		h.LockLink.Hang()
		w.last(r, h, name, 0.05, 2)
	}},
	{"slow", 8, func(w *world, h *host, r *rand.Rand, name string) {
		h.LockLink.Slow(min(w.between(r, 0.01, 0.3), 2500*time.Millisecond))
		w.last(r, h, name, 0.3, 2)
	}},
	{"refuse", 4, func(w *world, h *host, r *rand.Rand, name string) {
		text := refusals[r.IntN(len(refusals))]
		h.LockLink.Every("").Where(isLocks).Refuse(text)
		w.last(r, h, name, 0.1, 1.5)
	}},
	{"late reply, then cut", 4, lateReplyThenCut},
	{"cancel during acquire", 4, cancelDuringAcquire},
	{"one call hangs", 2, func(w *world, h *host, r *rand.Rand, name string) {
		w.meet(h, name, isLocks, 1).SwallowRequest()
		w.sleep(w.between(r, 0.3, 1.5))
	}},
}, verbTroubles()...)

var refusals = []string{
	"LOADING Redis is loading the dataset in memory", "OOM command not allowed when used memory > 'maxmemory'.",
	"READONLY You can't write against a read only replica.", "BUSY Redis is busy running a script.",
	"MISCONF Redis is configured to save RDB snapshots", "ERR max number of clients reached",
}

func isLocks(c virtual.Command) bool {
	name, _, _ := verb(c)
	return name != ""
}

func is(want string) func(virtual.Command) bool {
	return func(c virtual.Command) bool {
		name, _, _ := verb(c)
		return name == want
	}
}

func verbTroubles() (all []trouble) {
	for _, v := range verbs {
		for _, f := range verbFaults {
			all = append(all, trouble{f.name + v, 1, func(w *world, h *host, r *rand.Rand, name string) {
				delay := w.between(r, 0.01, 0.6)
				fault := w.meet(h, name, is(v), 1+r.IntN(3))
				f.do(fault, delay)
				if w.sleep(w.between(r, 0.3, 1.5)); fault.Hits() > 0 && strings.HasPrefix(name, "delay") {
					w.sleep(delay)
				}
			}})
		}
	}
	return all
}

// meet makes the next few commands that match meet a fault, and notes each. A fault that meets nothing is none.
func (w *world) meet(h *host, name string, match func(virtual.Command) bool, times int) *virtual.Fault {
	return h.LockLink.Next("").Times(times).Where(func(c virtual.Command) bool {
		matches := match(c)
		if matches {
			w.fault(name, h.Name, "", w.now())
		}
		return matches
	})
}

// last lets what has been broken last from a to b TTLs.
func (w *world) last(r *rand.Rand, h *host, name string, a, b float64) {
	from := w.now()
	w.sleep(w.between(r, a, b))
	w.fault(name, h.Name, "", from)
}

// lateReplyThenCut tempts a holder to count its validity from the reply.
func lateReplyThenCut(w *world, h *host, r *rand.Rand, name string) {
	late := min(w.between(r, 0.1, 0.24), h.RDB.Options().ReadTimeout*9/10)
	fault := w.meet(h, "delay reply to acquire or extend", func(c virtual.Command) bool { return is("acquire")(c) || is("extend")(c) }, 1)
	fault.DelayReply(late)
	for range 20 {
		if !w.sleep(w.ttl/20) || fault.Hits() > 0 {
			break
		}
	}
	if fault.Hits() == 0 || !w.sleep(late) {
		return
	}
	h.LockLink.Cut()
	w.last(r, h, name, 1.1, 1.5)
}

// cancelDuringAcquire tempts a task that asynq has taken back to run, because it got its lock after all.
func cancelDuringAcquire(w *world, h *host, r *rand.Rand, name string) {
	late := min(w.between(r, 0.1, 0.24), h.RDB.Options().ReadTimeout*9/10)
	w.meet(h, name, func(c virtual.Command) bool {
		verb, _, args := verb(c)
		if verb != "acquire" {
			return false
		}
		task, _ := holder(args[0])
		w.Spawn(func() {
			time.Sleep(late / 2)
			w.cancel(task)
		})
		return true
	}, 1).DelayReply(late)
	w.sleep(w.between(r, 0.3, 1))
}

var queueTroubles = []trouble{
	{history.FaultQueue + "cut", 3, func(w *world, h *host, r *rand.Rand, name string) {
		h.QueueLink.Cut()
		w.last(r, h, name, 0.1, 1)
	}},
	{history.FaultQueue + "hang", 4, func(w *world, h *host, r *rand.Rand, name string) { // past asynq's lease of 30 s
		from := w.now()
		h.QueueLink.Hang()
		w.sleep(time.Duration(25+r.IntN(100)) * time.Second)
		w.fault(name, h.Name, "", from)
	}},
	{history.FaultQueue + "slow", 2, func(w *world, h *host, r *rand.Rand, name string) {
		h.QueueLink.Slow(min(w.between(r, 0.01, 0.2), 2*time.Second))
		w.last(r, h, name, 0.3, 2)
	}},
	{history.FaultQueue + "loses replies", 2, func(w *world, h *host, r *rand.Rand, name string) {
		h.QueueLink.Next("").Times(1 + r.IntN(5)).Where(func(c virtual.Command) bool { return c.Script != "" }).LoseReply()
		w.last(r, h, name, 0.3, 2)
	}},
}

var serverTroubles = []trouble{
	{history.FaultOther + "shutdown", 1, func(w *world, h *host, r *rand.Rand, name string) {
		from := w.now()
		h.stop()
		w.sleep(w.between(r, 0, 1))
		w.fault(name, h.Name, "", from)
		h.start()
	}},
}

// What is done to Redis. The checker knows the names of those that lose locks.
const (
	faultScripts = history.FaultOther + "script flush"
	faultRestart = history.FaultRestart
)

var dataTroubles = []trouble{
	{history.FaultDelete, 3, func(w *world, _ *host, r *rand.Rand, name string) {
		key := w.keyOf(r)
		w.Alone(func() {
			if w.Redis.Exists(key) {
				w.forget(name, key)
			}
		})
	}},
	{history.FaultDelete, 1, func(w *world, _ *host, r *rand.Rand, name string) { // by ForceRelease
		key := w.keyOf(r)
		w.Alone(func() {
			if w.Redis.Exists(key) {
				w.ledger.forget(key)
				bare := strings.TrimSuffix(strings.TrimPrefix(key, prefix+"{"), "}")
				if err := w.bare.ForceRelease(context.Background(), bare); err != nil {
					w.T.Errorf("force release: %v", err)
				}
				w.fault(name, "", key, w.now())
			}
		})
	}},
	{history.FaultSteal, 3, func(w *world, _ *host, r *rand.Rand, name string) {
		key, ttl := w.keyOf(r), w.between(r, 0.2, 1.5)
		value := thieves[r.IntN(len(thieves))]
		w.Alone(func() {
			w.Redis.Del(key)
			if value == "" {
				w.Redis.HSet(key, "of", "another type")
			} else if err := w.Redis.Set(key, value); err != nil {
				w.T.Errorf("steal key: %v", err)
			}
			w.Redis.SetTTL(key, ttl)
			w.ledger.stolen(key, "stolen: "+value, ttl)
			w.fault(name, "", key, w.now())
			w.add(history.Record{Kind: history.KindSet, Process: "thief", Task: "thief", Key: key})
		})
	}},
	{history.FaultFlush, 2, func(w *world, _ *host, _ *rand.Rand, name string) {
		w.Alone(func() { w.forget(name, w.lockKeys()...) })
	}},
	{faultScripts, 2, func(w *world, _ *host, _ *rand.Rand, name string) { w.flushScripts(name) }},
	{faultRestart, 1, func(w *world, _ *host, _ *rand.Rand, name string) { w.restart(name) }},
	{history.FaultLossy, 1, func(w *world, _ *host, _ *rand.Rand, name string) {
		w.restart(faultRestart)
		w.Alone(func() { w.forget(name, w.lockKeys()...) })
	}},
}

// thieves are what a key is overwritten with: another's lock, one of a later version, a stranger's text, something that is no text.
var thieves = []string{
	`redislock/1 {"task_id":"thief","task_type":"theft","queue":"default","host":"elsewhere","pid":1,"since":"2000-01-01T00:00:00Z","token":"t"}`,
	`redislock/9 in a format of the future`,
	`a stranger's text`,
	``,
}

// forget deletes keys and notes it: of one key, or of all.
func (w *world) forget(name string, keys ...string) {
	for _, key := range keys {
		w.Redis.Del(key)
	}
	w.ledger.forget(keys...)
	which := ""
	if name == history.FaultDelete {
		which = keys[0]
	}
	w.fault(name, "", which, w.now())
}

func (w *world) flushScripts(name string) {
	w.Alone(func() {
		if err := w.RDB.ScriptFlush(context.Background()).Err(); err != nil {
			w.T.Errorf("flush scripts: %v", err)
		}
	})
	w.fault(name, "", "", w.now())
}

// restart breaks every connection and forgets the scripts.
func (w *world) restart(name string) {
	w.flushScripts(faultScripts)
	w.fault(name, "", "", w.now())
	for _, h := range w.hosts {
		h.LockLink.Break()
		h.QueueLink.Break()
	}
}

// lockKeys returns the keys of all locks and markers.
func (w *world) lockKeys() (keys []string) {
	for _, key := range w.Redis.Keys() {
		if strings.HasPrefix(key, prefix) {
			keys = append(keys, key)
		}
	}
	return keys
}

// isLock reports whether the value at a key is a lock's, and not a marker or a fence counter.
func isLock(key, value string) bool {
	return strings.HasSuffix(key, "}") && !strings.Contains(value, `"done":true`)
}
