package history

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"example.com/redislock"
)

// What only exact time allows: no process stalls, stops or dies, so that every limit is one.

func (c *checker) checkExact(history []Record) {
	claimed := make(map[claim]bool) // by whom a key has been held
	for _, r := range history {
		if r.Kind == KindSet {
			claimed[claim{r.Key, r.Task}] = true
		}
	}
	c.checkAttempts()
	for _, d := range c.deliveries {
		if c.checkEnd(d); len(d.outcomes) == 1 && d.arrival != nil {
			c.checkOutcome(d, d.outcomes[0], claimed)
		}
		for _, a := range d.acquired {
			c.checkSets(d, a)
		}
		c.checkMarker(d)
		if d.enter != nil && d.taken != 0 && d.enter.T > d.taken+c.slack {
			c.Add(BadStart, "%s/%d: task %s began %v after asynq had taken it back", d.process, d.n, d.task, time.Duration(d.enter.T-d.taken))
		}
	}
}

type claim struct{ key, task string }

// checkOutcome looks at why a task did not run.
func (c *checker) checkOutcome(d *delivery, o Record, claimed map[claim]bool) {
	kind := redislock.EventKind(o.Kind)
	itself := o.Holder == d.task
	switch kind {
	case redislock.EventSkipped, redislock.EventDone:
		if !claimed[claim{o.Key, o.Holder}] {
			c.Add(BadSkip, "%s/%d: task %s %s for %q, which never had %s", d.process, d.n, d.task, kind, o.Holder, o.Key)
		}
	case redislock.EventArchived:
		// On its last attempt a task waits until its deadline is near.
		near := d.arrival.Until - max(int64(time.Second), (d.arrival.Until-d.seen)/20) - c.slack
		if (itself || !d.arrival.Archives) && (d.arrival.Until == 0 || o.T < near) {
			c.Add(BadArchive, "%s/%d: task %s archived %v before its deadline, held by %q: %s", d.process, d.n, d.task,
				time.Duration(d.arrival.Until-o.T), o.Holder, o.Err)
		}
	case redislock.EventRan:
		if d.enter != nil && d.enter.Unlocked != o.Unlocked {
			c.Add(BadBooks, "%s/%d: task %s ran unlocked, by its outcome: %v, by its handler: %v", d.process, d.n, d.task, o.Unlocked, d.enter.Unlocked)
		}
	case redislock.EventRefused:
		if d.exit == nil && strings.Contains(o.Err, redislock.ErrUnavailable.Error()) {
			c.Add(BadBooks, "%s/%d: task %s has lost an attempt to a Redis that was not there: %s", d.process, d.n, d.task, o.Err)
		}
		if itself && d.exit == nil {
			c.Add(BadSkip, "%s/%d: task %s refused because of its own earlier run", d.process, d.n, d.task)
		}
	}
}

// checkEnd wants every delivery and lock that its process had to be over by the time its Shutdown returned: the locks in any case,
// and what ran unless Shutdown lost its patience.
func (c *checker) checkEnd(d *delivery) {
	end, known := c.ends[d.process]
	if !known {
		return
	}
	for i, a := range d.acquired {
		if a.T > end.T && end.Err == "" {
			c.Add(BadBooks, "%s/%d: task %s acquired %s after Shutdown", d.process, d.n, d.task, a.Key)
		}
		if a.T < end.T && i < len(d.ended) && d.ended[i].T > end.T+c.slack {
			c.Add(BadBooks, "%s/%d: task %s: the lock of %s ended %v after Shutdown", d.process, d.n, d.task, a.Key, time.Duration(d.ended[i].T-end.T))
		}
	}
	for _, o := range d.outcomes {
		if end.Err == "" && d.exit != nil && o.T > end.T+c.slack {
			c.Add(BadBooks, "%s/%d: task %s %s %v after Shutdown", d.process, d.n, d.task, o.Kind, time.Duration(o.T-end.T))
		}
	}
	if len(d.outcomes) == 0 && !d.try || len(d.ended) < len(d.acquired) {
		c.Add(BadBooks, "%s/%d: task %s is never over", d.process, d.n, d.task)
	}
}

// checkSets compares what the holder believed with what Redis did, when did it: the TTL was set at sets, and runs from there.
func (c *checker) checkSets(d *delivery, acquired Record) {
	if len(d.acquired) != 1 || len(d.ended) != 1 {
		return // the books say so
	}
	ended, validity := d.ended[0], c.ttl-c.ttl/10
	kind := redislock.EventKind(ended.Kind)
	believed, exit := ended.T, d.exit
	if d.inner != nil {
		exit = d.inner.exit
	}
	if exit != nil { // a release may be told long after it
		believed = min(believed, exit.T)
	}
	if d.arrival == nil {
		return // never seen, say the books
	}
	slices.Sort(d.sets)
	sets := slices.DeleteFunc(slices.Clone(d.sets), func(t int64) bool { return t > believed })
	if len(sets) == 0 {
		c.Add(BadModel, "%s/%d: task %s was given %s, which Redis never gave it", d.process, d.n, d.task, acquired.Key)
		return
	}
	for i, t := range sets {
		next := believed
		if i+1 < len(sets) {
			next = sets[i+1]
		}
		if next-t > validity+c.slack {
			c.Add(BadNotice, "%s/%d: task %s still believed in %s %v after Redis had last confirmed it, at %d", d.process, d.n, d.task, acquired.Key,
				time.Duration(next-t), t)
		}
	}
	if late := slices.Max(d.sets) - ended.T - c.ttl - c.slack; late > 0 {
		c.Add(BadLeftover, "%s/%d: task %s: %s was extended %v after its end", d.process, d.n, d.task, acquired.Key, time.Duration(late+c.ttl))
	}
	switch kind {
	case redislock.EventLost:
		_, loss := c.lossOf(acquired.Key, d.sets[0], ended.T)
		if !loss && c.reachable(d.process, ended.T, ended.T) {
			c.Add(BadLoss, "%s/%d: task %s lost %s at %d: %s", d.process, d.n, d.task, acquired.Key, ended.T, ended.Err)
		}
	case redislock.EventAbandoned:
		c.checkAbandoned(d, ended)
	case redislock.EventReleased:
		if ended.Err != "" && c.ends[d.process].Err == "" && c.reachable(d.process, believed, ended.T) {
			c.Add(BadLoss, "%s/%d: task %s: the release of %s is not confirmed, and Redis was there: %s", d.process, d.n, d.task, acquired.Key, ended.Err)
		}
	}
	if over := d.taken + d.arrival.Grace + c.slack; d.taken != 0 && ended.T > over && (exit == nil || exit.T > over) {
		c.Add(BadGrace, "%s/%d: task %s kept %s for %v after its end", d.process, d.n, d.task, acquired.Key, time.Duration(ended.T-d.taken))
	}
}

// checkAbandoned wants the reason: the grace period is over, or Shutdown lost its patience.
func (c *checker) checkAbandoned(d *delivery, ended Record) {
	shutdown := c.ends[d.process]
	impatient := shutdown.Err != "" && ended.T >= shutdown.T-c.slack && ended.T <= shutdown.T+c.slack
	graceOver := d.taken != 0 && ended.T >= d.taken+d.arrival.Grace-c.slack
	if !impatient && !graceOver {
		c.Add(BadGrace, "%s/%d: task %s: %s abandoned at %d, with the task's end at %d: %s", d.process, d.n, d.task, ended.Key, ended.T, d.taken, ended.Err)
	}
}

// checkMarker wants a task that arrives while the marker of a run stands to end as done.
func (c *checker) checkMarker(d *delivery) {
	for _, o := range d.outcomes {
		switch redislock.EventKind(o.Kind) {
		case redislock.EventSkipped, redislock.EventRequeued, redislock.EventArchived, redislock.EventRefused:
		default:
			continue
		}
		for _, a := range c.runs[o.Key] {
			stands := a.DoneFor > 0 && a.succeeded && a.endedAs == redislock.EventReleased && a.endErr == ""
			if !stands || o.Holder != a.Task || d.seen <= a.ended || o.T >= a.to+a.DoneFor-c.slack {
				continue
			}
			if _, lost := c.lossOf(a.Key, a.to, o.T); !lost {
				c.Add(BadMarker, "%s/%d: task %s %s, though %s has done its work at %d", d.process, d.n, d.task, o.Kind, a.Task, a.to)
			}
		}
	}
}

// checkAttempts wants no task to lose an attempt for a delivery that was put back.
func (c *checker) checkAttempts() {
	tasks := make(map[string][]*delivery)
	for _, d := range c.deliveries {
		if d.arrival != nil && d.outer == nil && !d.try {
			tasks[d.task] = append(tasks[d.task], d)
		}
	}
	for task, all := range tasks {
		slices.SortFunc(all, func(a, b *delivery) int { return cmp.Compare(a.seen, b.seen) })
		counted, from := 0, int64(0)
		for _, d := range all {
			if c.queueTrouble(from, d.seen) {
				break // asynq may have lost and recovered the task without anybody having seen it
			}
			if d.arrival.Retried > counted {
				c.Add(BadBooks, "%s/%d: task %s has failed %d times, as asynq counts, and %d times at most, as it ran", d.process, d.n, task, d.arrival.Retried, counted)
				break
			}
			putBack := len(d.outcomes) == 1 && d.outcomes[0].Kind == string(redislock.EventRequeued)
			if !putBack || d.taken != 0 {
				counted++
			}
			from = d.seen
		}
	}
}

// queueTrouble reports whether something stood between any process and the queue.
func (c *checker) queueTrouble(from, to int64) bool {
	return slices.ContainsFunc(c.faults, func(f Record) bool {
		return f.T <= to && f.Until >= from && (strings.HasPrefix(f.Fault, FaultQueue) || f.Fault == FaultRestart)
	})
}
