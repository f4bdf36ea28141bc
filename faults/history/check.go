package history

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/redislock"
)

// A violation breaks a promise of the lock.
type Violation struct {
	Kind string
	Text string
}

// The kinds of violations.
const (
	BadOverlap  = "overlap"        // two handlers of one key at once, and nothing that excuses it
	BadNotice   = "late notice"    // a holder learned too late that its lock is lost
	BadTask     = "lost task"      // neither done, nor dropped by the rules, nor in the queue
	BadArchive  = "no reason"      // archived, and nobody says why
	BadSkip     = "skipped itself" // dropped as a duplicate of its own earlier run
	BadMarker   = "false marker"   // dropped as done though the work was not done
	BadTwice    = "done twice"     // run again while its done marker had to stand
	BadTTL      = "immortal key"   // a lock key without a TTL, or with more than it may have
	BadLeftover = "leftover key"   // a lock key that outlived its holder by more than a TTL
	BadBooks    = "books"          // outcomes or locks that are not balanced
	BadHistory  = "rig"            // the history itself does not make sense
)

// What excuses an overlap or a second run. Each is counted and shown.
const (
	ExcuseLoss  = "data loss"       // Redis lost the lock
	ExcusePause = "pause"           // the holder was stopped for longer than its lock was valid
	ExcuseStall = "stall"           // the same, by a machine that was too busy: its own timers say so
	ExcuseDeaf  = "ignored context" // the holder was told in time and went on
)

// Findings are what a history says.
type Findings struct {
	Cycles     int            // locks acquired and ended
	Runs       int            // handlers run to their end
	Enqueued   int            // tasks
	Queue      map[string]int // tasks that asynq still has, by state
	Events     map[string]int // by kind, of the product
	Faults     map[string]int // by fault
	Killed     int            // processes
	OpenBooks  int            // deliveries and locks that ended with their process
	Excused    map[string]int // overlaps and second runs that the promises allow, by excuse
	Longest    time.Duration  // the longest overlap that is excused
	Violations []Violation
}

func (f *Findings) add(kind, format string, args ...any) {
	f.Violations = append(f.Violations, Violation{kind, fmt.Sprintf(format, args...)})
}

func (f *Findings) Count(kind string) (n int) {
	for _, v := range f.Violations {
		if v.Kind == kind {
			n++
		}
	}
	return n
}

// run is a handler's stay in its critical section, with the lock it ran under.
type run struct {
	Record               // of its start
	from, to       int64 // stamps inside of the critical section
	holdsFileUntil int64 // at most
	succeeded      bool
	asked          int64 // when the lock was asked for, at the earliest
	acquired       int64 // the lock's life; 0 where it is unknown
	ended          int64
	endedAs        redislock.EventKind
	endErr         string
}

func (r *run) String() string {
	return fmt.Sprintf("%s of %s/%d, at work %d–%d, lock %d–%d %s %s", r.Task, r.Process, r.Delivery, r.from, r.to, r.acquired, r.ended, r.endedAs, r.endErr)
}

// told is when the handler knew the end of its lock, or needed not to know any more.
func (r *run) told() int64 {
	if r.ended == 0 {
		return r.to
	}
	return min(r.ended, r.to)
}

// delivery is one way of a task through the middleware.
type delivery struct {
	process  string
	n        int64
	task     string
	seen     int64
	acquired []Record
	ended    []Record
	outcomes []Record
	enter    *Record
	exit     *Record
}

type checker struct {
	Findings
	ttl        int64
	slack      int64 // for timers and scheduling on a busy machine
	deliveries map[deliveryID]*delivery
	runs       map[string][]*run // by key, in the order of their locks
	faults     []Record
	losses     []Record            // those of the faults by which Redis forgets keys, in their order
	stalls     map[string][]Record // by process
	ends       map[string]Record   // the last word on a process
	gone       map[string]int64    // when it had let go of its file locks
}

type deliveryID struct {
	process string
	n       int64
}

// Terms are what the checker has to know of the locks and of the clock that a history was made with.
type Terms struct {
	TTL   time.Duration
	Slack time.Duration // for timers and scheduling on a busy machine; little in virtual time
}

// Check reads a whole history, in the order of its stamps.
func Check(history []Record, terms Terms) Findings {
	c := &checker{
		Findings: Findings{
			Queue: make(map[string]int), Events: make(map[string]int), Faults: make(map[string]int), Excused: make(map[string]int),
		},
		ttl:        int64(terms.TTL),
		slack:      int64(terms.Slack),
		deliveries: make(map[deliveryID]*delivery),
		runs:       make(map[string][]*run),
		stalls:     make(map[string][]Record),
		ends:       make(map[string]Record),
		gone:       make(map[string]int64),
	}
	c.collect(history)
	c.checkBooks()
	c.checkTasks(history)
	c.gatherRuns()
	for _, key := range sortedKeys(c.runs) {
		c.checkOverlaps(c.runs[key])
		c.checkNotice(c.runs[key])
		c.checkTwice(c.runs[key])
	}
	return c.Findings
}

func (c *checker) delivery(r Record) *delivery {
	id := deliveryID{r.Process, r.Delivery}
	d := c.deliveries[id]
	if d == nil {
		d = &delivery{process: r.Process, n: r.Delivery, task: r.Task}
		c.deliveries[id] = d
	}
	return d
}

func (c *checker) collect(history []Record) {
	for _, r := range history {
		switch r.Kind {
		case KindSeen:
			d := c.delivery(r)
			if d.seen != 0 {
				c.add(BadHistory, "%s/%d: seen twice", r.Process, r.Delivery)
			}
			d.seen = r.T
		case KindEnter:
			c.delivery(r).enter = &r
		case KindExit:
			c.delivery(r).exit = &r
			c.Findings.Runs++
		case KindStall:
			c.stalls[r.Process] = append(c.stalls[r.Process], r)
		case KindKilled, KindDied, KindBye:
			if _, known := c.ends[r.Process]; !known || r.Kind == KindKilled {
				c.ends[r.Process] = r
			}
			switch r.Kind {
			case KindKilled:
				c.Killed++
			case KindDied:
				c.add(BadHistory, "%s ended without being told to: %s", r.Process, r.Err)
			}
		case KindFault:
			c.faults = append(c.faults, r)
			c.Findings.Faults[r.Fault]++
			switch r.Fault {
			case FaultFlush, FaultLossy, FaultDelete, FaultSteal:
				c.losses = append(c.losses, r)
			}
		case KindImmortal:
			c.add(BadTTL, "%s: %s", r.Key, r.Err)
		case KindLeftover:
			c.add(BadLeftover, "%s: %s", r.Key, r.Err)
		case KindGone:
			c.gone[r.Process] = r.T
		case KindEnqueued, KindQueued:
		default:
			d := c.delivery(r)
			c.Events[r.Kind]++
			switch redislock.EventKind(r.Kind) {
			case redislock.EventAcquired:
				d.acquired = append(d.acquired, r)
			case redislock.EventReleased, redislock.EventLost, redislock.EventAbandoned:
				d.ended = append(d.ended, r)
				c.Cycles++
			case redislock.EventRan, redislock.EventSkipped, redislock.EventDone, redislock.EventRequeued,
				redislock.EventArchived, redislock.EventRefused, redislock.EventPassed:
				d.outcomes = append(d.outcomes, r)
			default:
				c.add(BadHistory, "record of kind %q", r.Kind)
			}
		}
	}
}

// checkBooks wants one outcome for each delivery and one end for each lock. A process that was killed leaves open books,
// one that lost its patience with its handlers their outcomes.
func (c *checker) checkBooks() {
	for _, d := range c.deliveries {
		end, known := c.ends[d.process]
		killed := end.Kind == KindKilled || end.Kind == KindDied
		impatient := end.Kind == KindBye && end.Err != ""
		switch {
		case !known:
			c.add(BadHistory, "%s has no end", d.process)
		case d.seen == 0:
			c.add(BadHistory, "%s/%d: never seen", d.process, d.n)
		case len(d.outcomes) > 1:
			c.add(BadBooks, "%s/%d: task %s has %d outcomes", d.process, d.n, d.task, len(d.outcomes))
		case len(d.outcomes) == 0 && !killed && !impatient:
			c.add(BadBooks, "%s/%d: task %s has no outcome", d.process, d.n, d.task)
		case len(d.outcomes) == 0:
			c.OpenBooks++
		}
		switch {
		case len(d.ended) > len(d.acquired):
			c.add(BadBooks, "%s/%d: task %s: %d locks acquired, %d ended", d.process, d.n, d.task, len(d.acquired), len(d.ended))
		case len(d.ended) < len(d.acquired) && !killed && (!impatient || d.exit == nil):
			c.add(BadBooks, "%s/%d: task %s: %d locks acquired, %d ended", d.process, d.n, d.task, len(d.acquired), len(d.ended))
		case len(d.ended) < len(d.acquired): // or Shutdown did not wait for the reply to a release
			c.OpenBooks++
		}
		ran := slices.ContainsFunc(d.outcomes, func(o Record) bool {
			return o.Kind == string(redislock.EventRan) || o.Kind == string(redislock.EventPassed)
		})
		if len(d.outcomes) > 0 && ran != (d.exit != nil) {
			c.add(BadBooks, "%s/%d: task %s: outcome %s, handler ran: %v", d.process, d.n, d.task, d.outcomes[0].Kind, d.exit != nil)
		}
	}
}

// checkTasks wants each task done, dropped by the rules, or still in the queue.
func (c *checker) checkTasks(history []Record) {
	type work struct{ key, task string }
	var enqueued []string
	accounted := make(map[string]bool) // by task; a worker may have it before the producer has noted it
	succeeded := make(map[work]bool)
	for _, r := range history {
		switch r.Kind {
		case KindEnqueued:
			c.Enqueued++
			enqueued = append(enqueued, r.Task)
		case KindExit:
			if r.Err == "" {
				succeeded[work{r.Key, r.Task}] = true
			}
		case string(redislock.EventRan), string(redislock.EventPassed), string(redislock.EventSkipped), string(redislock.EventDone):
			switch redislock.EventKind(r.Kind) {
			case redislock.EventSkipped:
				if r.Holder == r.Task {
					c.add(BadSkip, "task %s on %s", r.Task, r.Process)
				}
			case redislock.EventDone:
				if !succeeded[work{r.Key, r.Holder}] {
					c.add(BadMarker, "task %s on %s: the marker of %q at %s, which has not succeeded", r.Task, r.Process, r.Holder, r.Key)
				}
			}
			if r.Err == "" {
				accounted[r.Task] = true
			}
		case KindQueued:
			c.Queue[r.State]++
			if r.State == "archived" && r.Err == "" {
				c.add(BadArchive, "task %s", r.Task)
			}
			accounted[r.Task] = true
		}
	}
	slices.Sort(enqueued)
	for _, task := range slices.Compact(enqueued) {
		if !accounted[task] {
			c.add(BadTask, "task %s", task)
		}
	}
}

// gatherRuns pairs each handler's enter and exit with the life of its lock.
func (c *checker) gatherRuns() {
	for _, d := range c.deliveries {
		if d.enter == nil {
			if d.exit != nil {
				c.add(BadHistory, "%s/%d: an exit without an enter", d.process, d.n)
			}
			continue
		}
		r := &run{Record: *d.enter, from: d.enter.T, to: c.ends[d.process].T}
		r.holdsFileUntil = max(r.to, c.gone[d.process])
		if d.exit != nil {
			r.to, r.holdsFileUntil, r.succeeded = d.exit.T, d.exit.T, d.exit.Err == ""
		}
		if len(d.acquired) == 1 {
			r.acquired = d.acquired[0].T
			r.asked = max(d.seen, r.acquired-c.ttl/4) // a try that takes longer is given back
		} else {
			c.add(BadHistory, "%s/%d: a handler under %d locks", d.process, d.n, len(d.acquired))
		}
		if len(d.ended) == 1 {
			r.ended, r.endedAs, r.endErr = d.ended[0].T, redislock.EventKind(d.ended[0].Kind), d.ended[0].Err
		}
		c.runs[r.Key] = append(c.runs[r.Key], r)
	}
	for _, runs := range c.runs {
		slices.SortFunc(runs, func(a, b *run) int { return cmp.Or(cmp.Compare(a.acquired, b.acquired), cmp.Compare(a.from, b.from)) })
	}
}

// checkOverlaps compares the critical sections of one key. The stamps lie inside of them, so what overlaps here did
// overlap; the file lock covers the rest.
func (c *checker) checkOverlaps(runs []*run) {
	clashed := make(map[*run]bool)
	for i, a := range runs {
		for _, b := range runs[i+1:] { // a had the lock first
			from, to := max(a.from, b.from), min(a.to, b.to)
			if from >= to {
				continue
			}
			clashed[a], clashed[b] = true, true
			c.judge(a, from, to, b)
		}
	}
	for i, b := range runs {
		if !b.Clash || clashed[b] {
			continue
		}
		// Too short for the stamps: the neighbour that ended last before it, or was there first.
		var a *run
		for j, other := range runs {
			if j != i && other.from <= b.from && (a == nil || other.holdsFileUntil > a.holdsFileUntil) {
				a = other
			}
		}
		if a == nil {
			c.add(BadHistory, "%s: task %s found the file lock taken, but by nobody known", b.Key, b.Task)
			continue
		}
		first, second := a, b
		if b.acquired < a.acquired {
			first, second = b, a
		}
		c.judge(first, b.from, b.from, second)
	}
}

// judge finds what excuses that a was still at work at the time from, when b, which had the lock after it, was as well.
func (c *checker) judge(a *run, from, to int64, b *run) {
	excuse, late := c.excuse(a, from)
	if excuse == "" {
		c.add(BadOverlap, "%s, for %v: %v, and %v", a.Key, time.Duration(to-from), a, b)
		return
	}
	c.Excused[excuse]++
	c.Longest = max(c.Longest, time.Duration(to-from))
	if late > 0 {
		c.add(BadNotice, "%s: %s of %s was told %v too late (%s)", a.Key, a.Task, a.Process, time.Duration(late), excuse)
	}
}

// excuse returns what allows run a to be at work still when another has its lock, and by how much a was told too late of a
// pause of its own.
func (c *checker) excuse(a *run, at int64) (excuse string, late int64) {
	if _, ok := c.lossOf(a.Key, a.asked, at); ok {
		return ExcuseLoss, 0 // checkNotice looks at when it was told
	}
	lost := a.endedAs == redislock.EventLost || a.endedAs == redislock.EventAbandoned
	if a.Deaf && lost && a.ended <= at {
		return ExcuseDeaf, 0
	}
	if end, ok := c.paused(a.Process, max(a.acquired, at-c.slack), at, c.ttl/2); ok {
		return ExcusePause, max(a.told()-end-c.slack, 0)
	}
	// A holder must stop a tenth of a TTL before its key lapses, so only a stall of about that, just before, can carry it
	// further.
	if _, ok := c.stopped(a, max(a.acquired, at-c.ttl/20), at, c.ttl/10-int64(10*time.Millisecond)); ok {
		return ExcuseStall, 0
	}
	return "", 0
}

// The faults that the checker reads. Whatever else a history names only explains that a worker could not reach Redis.
const (
	FaultPause    = "pause"
	FaultFlush    = "flushall"
	FaultDelete   = "delete key"
	FaultSteal    = "steal key"
	FaultLossy    = "kill redis without aof"
	FaultSwallow  = "swallow " // and the verb
	FaultOneReply = "silent"
)

// lossOf finds the last fault by which Redis forgot key between the two stamps.
func (c *checker) lossOf(key string, from, to int64) (loss Record, ok bool) {
	for _, f := range c.losses {
		if f.Until >= from && f.T <= to && (f.Key == "" || f.Key == key) {
			loss, ok = f, true
		}
	}
	return loss, ok
}

// checkNotice wants each holder whose lock Redis forgot to know it by its next extension, or by its own deadline where
// something stood between the two.
func (c *checker) checkNotice(runs []*run) {
	for _, a := range runs {
		told := a.told()
		f, ok := c.lossOf(a.Key, a.acquired, told)
		if !ok || f.T < a.acquired {
			continue
		}
		due := f.Until + c.ttl/3 + c.slack
		if !c.reachable(a, f.T, told) {
			due = f.Until + c.ttl + c.slack
		}
		if end, stopped := c.stopped(a, f.T, told, c.ttl/20); stopped {
			due = max(due, end+c.ttl/3+c.slack)
		}
		if told > due {
			c.add(BadNotice, "%s: %v, %v too late of %s at %d", a.Key, a, time.Duration(told-due), f.Fault, f.T)
		}
	}
}

// reachable reports whether nothing stood between the run's process and Redis.
func (c *checker) reachable(a *run, from, to int64) bool {
	for _, f := range c.faults {
		if f.T > to || f.Until < from-c.ttl {
			continue
		}
		switch {
		case f.Fault == FaultPause, f.Fault == FaultFlush, f.Fault == FaultDelete, f.Fault == FaultSteal, f.Fault == FaultLossy:
		case f.Process == "" || processOn(f.Process, a.Process):
			return false
		}
	}
	return true
}

// processOn reports whether process is an incarnation of the worker, or that very process.
func processOn(worker, process string) bool {
	return worker == process || strings.HasPrefix(process, worker+"-")
}

// paused finds a SIGSTOP of process that lasted at least least.
func (c *checker) paused(process string, from, to, least int64) (end int64, ok bool) {
	for _, f := range c.faults {
		if f.Fault == FaultPause && processOn(f.Process, process) && f.Until-f.T >= least && f.T <= to && f.Until >= from {
			end, ok = max(end, f.Until), true
		}
	}
	return end, ok
}

// stopped finds a time in which the run's process did not run, for whichever reason.
func (c *checker) stopped(a *run, from, to, least int64) (end int64, ok bool) {
	for _, s := range c.stalls[a.Process] {
		if s.Until-s.T >= least && s.T <= to && s.Until >= from {
			end, ok = max(end, s.Until), true
		}
	}
	if e, paused := c.paused(a.Process, from, to, least); paused {
		return max(end, e), true
	}
	return end, ok
}

// checkTwice wants no run while the marker of an earlier one stands, that is from its confirmed release on until its time,
// which began at the end of the run or later, is over.
func (c *checker) checkTwice(runs []*run) {
	const rounding = int64(5 * time.Millisecond)
	for i, a := range runs {
		if a.DoneFor == 0 || !a.succeeded || a.endedAs != redislock.EventReleased || a.endErr != "" {
			continue // no marker was promised
		}
		for _, b := range runs[i+1:] {
			if b.acquired <= a.ended || b.acquired >= a.to+a.DoneFor-rounding {
				continue
			}
			if _, ok := c.lossOf(a.Key, a.to, b.acquired); ok {
				c.Excused[ExcuseLoss]++
				continue
			}
			c.add(BadTwice, "%s: %s of %s was done at %d, and %s of %s ran %v later", a.Key, a.Task, a.Process, a.to, b.Task, b.Process, time.Duration(b.acquired-a.to))
		}
	}
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
