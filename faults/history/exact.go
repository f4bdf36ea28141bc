package history

import (
	"slices"
	"strings"
	"time"

	"example.com/redislock"
)

// What only exact time allows: no process stalls, stops or dies, so that every limit is one.

func (c *checker) checkExact(history []Record) {
	claimed := make(map[claim]bool) // by whom a key has been held
	last := make(map[string]Record) // the last outcome of each task
	for _, r := range history {
		switch redislock.EventKind(r.Kind) {
		case KindSet:
			claimed[claim{r.Key, r.Task}] = true
		case redislock.EventRan, redislock.EventSkipped, redislock.EventDone, redislock.EventRequeued,
			redislock.EventArchived, redislock.EventRefused, redislock.EventPassed:
			last[r.Task] = r
		}
	}
	for _, r := range history {
		if o, ok := last[r.Task]; r.Kind == KindQueued && r.State == "archived" && ok &&
			o.Kind == string(redislock.EventRequeued) && strings.Contains(r.Err, "redislock:") {
			c.add(BadArchive, "task %s was to be put back, and asynq archived it: %s", r.Task, r.Err)
		}
	}
	for _, d := range c.deliveries {
		if c.checkEnd(d); len(d.outcomes) == 1 && d.arrival != nil {
			c.checkOutcome(d, d.outcomes[0], claimed)
		}
		for _, a := range d.acquired {
			c.checkSets(d, a)
		}
		if d.enter != nil && d.enter.Unlocked && !d.passed() {
			c.checkUnlocked(d)
		}
		if d.enter != nil && d.taken != 0 && d.enter.T > d.taken+c.slack {
			c.add(BadStart, "%s/%d: task %s began %v after asynq had taken it back", d.process, d.n, d.task, time.Duration(d.enter.T-d.taken))
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
			c.add(BadSkip, "%s/%d: task %s %s for %q, which never had %s", d.process, d.n, d.task, kind, o.Holder, o.Key)
		}
	case redislock.EventArchived:
		// On its last attempt a task waits until its deadline is near.
		near := d.arrival.Until - max(int64(time.Second), (d.arrival.Until-d.seen)/20) - c.slack
		if (itself || !d.arrival.Archives) && (d.arrival.Until == 0 || o.T < near) {
			c.add(BadArchive, "%s/%d: task %s archived %v before its deadline, held by %q: %s", d.process, d.n, d.task,
				time.Duration(d.arrival.Until-o.T), o.Holder, o.Err)
		}
	case redislock.EventRan:
		if d.enter != nil && d.enter.Unlocked != o.Unlocked {
			c.add(BadBooks, "%s/%d: task %s ran unlocked, by its outcome: %v, by its handler: %v", d.process, d.n, d.task, o.Unlocked, d.enter.Unlocked)
		}
	case redislock.EventRefused:
		if itself && d.exit == nil {
			c.add(BadSkip, "%s/%d: task %s refused because of its own earlier run", d.process, d.n, d.task)
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
			c.add(BadBooks, "%s/%d: task %s acquired %s after Shutdown", d.process, d.n, d.task, a.Key)
		}
		if a.T < end.T && i < len(d.ended) && d.ended[i].T > end.T+c.slack {
			c.add(BadBooks, "%s/%d: task %s: the lock of %s ended %v after Shutdown", d.process, d.n, d.task, a.Key, time.Duration(d.ended[i].T-end.T))
		}
	}
	for _, o := range d.outcomes {
		if end.Err == "" && d.exit != nil && o.T > end.T+c.slack {
			c.add(BadBooks, "%s/%d: task %s %s %v after Shutdown", d.process, d.n, d.task, o.Kind, time.Duration(o.T-end.T))
		}
	}
	if len(d.outcomes) == 0 && !d.try || len(d.ended) < len(d.acquired) {
		c.add(BadBooks, "%s/%d: task %s is never over", d.process, d.n, d.task)
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
	slices.Sort(d.sets)
	sets := slices.DeleteFunc(slices.Clone(d.sets), func(t int64) bool { return t > believed })
	if len(sets) == 0 {
		c.add(BadModel, "%s/%d: task %s was given %s, which Redis never gave it", d.process, d.n, d.task, acquired.Key)
		return
	}
	for i, t := range sets {
		next := believed
		if i+1 < len(sets) {
			next = sets[i+1]
		}
		if next-t > validity+c.slack {
			c.add(BadNotice, "%s/%d: task %s still believed in %s %v after Redis had last confirmed it, at %d", d.process, d.n, d.task, acquired.Key,
				time.Duration(next-t), t)
		}
	}
	if late := slices.Max(d.sets) - ended.T - c.ttl - c.slack; late > 0 {
		c.add(BadLeftover, "%s/%d: task %s: %s was extended %v after its end", d.process, d.n, d.task, acquired.Key, time.Duration(late+c.ttl))
	}
	switch kind {
	case redislock.EventLost:
		_, loss := c.lossOf(acquired.Key, d.sets[0], ended.T)
		if r := (&run{Record: acquired}); !loss && c.reachable(r, ended.T, ended.T) {
			c.add(BadLoss, "%s/%d: task %s lost %s at %d: %s", d.process, d.n, d.task, acquired.Key, ended.T, ended.Err)
		}
	case redislock.EventAbandoned:
		c.checkAbandoned(d, ended)
	}
	if over := d.taken + d.arrival.Grace + c.slack; d.taken != 0 && ended.T > over && (exit == nil || exit.T > over) {
		c.add(BadGrace, "%s/%d: task %s kept %s for %v after its end", d.process, d.n, d.task, acquired.Key, time.Duration(ended.T-d.taken))
	}
}

// checkAbandoned wants the reason: the grace period is over, or Shutdown lost its patience.
func (c *checker) checkAbandoned(d *delivery, ended Record) {
	shutdown := c.ends[d.process]
	impatient := shutdown.Err != "" && ended.T >= shutdown.T-c.slack && ended.T <= shutdown.T+c.slack
	graceOver := d.taken != 0 && ended.T >= d.taken+d.arrival.Grace-c.slack
	if !impatient && !graceOver {
		c.add(BadGrace, "%s/%d: task %s: %s abandoned at %d, with the task's end at %d: %s", d.process, d.n, d.task, ended.Key, ended.T, d.taken, ended.Err)
	}
}

// checkUnlocked wants a handler without a lock to have neither got one, nor a reason to have got one.
func (c *checker) checkUnlocked(d *delivery) {
	if len(d.acquired) > 0 {
		c.add(BadBooks, "%s/%d: task %s runs unlocked, and has a lock", d.process, d.n, d.task)
	}
	if c.reachable(&run{Record: *d.enter}, d.seen, d.enter.T) {
		c.add(BadLoss, "%s/%d: task %s runs unlocked, and Redis was there", d.process, d.n, d.task)
	}
}
