package history

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/redislock"
)

// Violation breaks a promise of the lock.
type Violation struct {
	Kind string
	Text string
}

// The kinds of violations.
const (
	BadOverlap  = "overlap"          // two handlers of one key at once, and nothing that excuses it
	BadNotice   = "late notice"      // a holder learned too late that its lock is lost
	BadTask     = "lost task"        // neither done, nor dropped by the rules, nor in the queue
	BadArchive  = "no reason"        // archived, and nobody says why
	BadDrop     = "dropped"          // dropped as a duplicate though its policy does not drop
	BadSkip     = "skipped itself"   // dropped as a duplicate of its own earlier run, or of nobody's
	BadMarker   = "false marker"     // dropped as done though the work was not done
	BadTwice    = "done twice"       // run again while its done marker had to stand
	BadTTL      = "immortal key"     // a lock key without a TTL, or with more than it may have
	BadLeftover = "leftover key"     // a lock key that outlived its holder by more than a TTL
	BadLoss     = "lost for nothing" // a lock lost though nothing kept Redis from extending it
	BadGrace    = "grace period"     // a lock kept too long for a handler that outlives its task, or not long enough
	BadStart    = "late start"       // a handler that began when asynq had settled its task
	BadModel    = "model"            // Redis did for a lock what no lock may ask for
	BadStuck    = "stuck"            // tasks that nothing hinders and that are not done for a long time
	BadBooks    = "books"            // outcomes or locks that are not balanced
	BadHistory  = "rig"              // the history itself does not make sense
)

// What excuses an overlap or a second run. Each is counted and shown.
const (
	ExcuseLoss   = "data loss"       // Redis lost the lock
	ExcusePause  = "pause"           // the holder was stopped for longer than its lock was valid
	ExcuseStall  = "stall"           // the same, by a machine that was too busy: its own timers say so
	ExcuseDeaf   = "ignored context" // the holder was told in time and went on
	ExcuseKilled = "killed"          // the system had not let go yet of the file lock of a process that runs no more
	ExcuseOpen   = "fail open"       // one of the two ran without a lock, as WithFailOpen lets it
)

// Findings are what a history says.
type Findings struct {
	Cycles     int            // locks acquired and ended
	Runs       int            // handlers run to their end
	Enqueued   int            // tasks
	Queue      map[string]int // tasks that asynq still has, by state
	Events     map[string]int // by kind, of the product
	Faults     map[string]int // by fault
	Unlocked   int            // handlers that ran without a lock (WithFailOpen)
	Writes     int            // fenced writes that were accepted
	Refused    int            // and refused, as they have to be
	Killed     int            // processes
	OpenBooks  int            // deliveries and locks that ended with their process
	Excused    map[string]int // overlaps and second runs that the promises allow, by excuse
	Longest    time.Duration  // the longest overlap that is excused
	Violations []Violation
}

// Add adds a violation.
func (f *Findings) Add(kind, format string, args ...any) {
	f.Violations = append(f.Violations, Violation{kind, fmt.Sprintf(format, args...)})
}

// Count counts the violations of a kind.
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
	lapses         int64 // the key of a lock that is not released is there until then; 0 where it is unknown
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
	outer    *delivery // of a middleware within another one
	inner    *delivery
	seen     int64
	acquired []Record
	ended    []Record
	outcomes []Record
	enter    *Record
	exit     *Record
	try      bool    // by Do or TryAcquire
	arrival  *Record // what was known of the delivery when it was seen
	taken    int64   // when asynq had settled the task or taken it back; 0 if it did not before the end
	sets     []int64 // when Redis set the TTL of its lock
}

// passed reports whether the handler needs no lock of its own.
func (d *delivery) passed() bool {
	return slices.ContainsFunc(d.outcomes, func(o Record) bool { return o.Kind == string(redislock.EventPassed) })
}

type checker struct {
	Findings
	ttl        int64
	slack      int64 // for timers and scheduling on a busy machine
	mayDrop    func(taskType, task string) bool
	exact      bool
	deliveries map[deliveryID]*delivery
	runs       map[string][]*run // by key, in the order of their locks
	faults     []Record
	losses     map[string][]Record // those of the faults by which Redis forgets a key, in their order; under "" all keys
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
	// MayDrop tells whether the policy lets a task be dropped as a duplicate. nil: any task may be.
	MayDrop func(taskType, task string) bool
	Exact   bool // the history is of virtual time, and no process dies: what follows from that is checked as well
}

// Check reads a whole history, in the order of its stamps.
func Check(history []Record, terms Terms) Findings {
	c := newChecker(terms)
	c.collect(history)
	c.checkBooks()
	c.checkTasks(history)
	c.gatherRuns()
	for _, key := range sortedKeys(c.runs) {
		c.checkOverlaps(c.runs[key])
		c.checkNotice(c.runs[key])
		c.checkTwice(c.runs[key])
		if !terms.Exact { // there a handler may hang in a call of its lock
			c.checkObeyed(c.runs[key])
		}
	}
	for _, d := range c.deliveries {
		if d.enter != nil && d.enter.Unlocked && !d.passed() {
			c.checkUnlocked(d)
		}
	}
	c.checkFences(history)
	if terms.Exact {
		c.checkExact(history)
	}
	return c.Findings
}

func newChecker(terms Terms) *checker {
	return &checker{
		Findings: Findings{
			Queue: make(map[string]int), Events: make(map[string]int), Faults: make(map[string]int), Excused: make(map[string]int),
		},
		ttl:        int64(terms.TTL),
		slack:      int64(terms.Slack),
		mayDrop:    terms.MayDrop,
		exact:      terms.Exact,
		deliveries: make(map[deliveryID]*delivery),
		runs:       make(map[string][]*run),
		losses:     make(map[string][]Record),
		stalls:     make(map[string][]Record),
		ends:       make(map[string]Record),
		gone:       make(map[string]int64),
	}
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
				c.Add(BadHistory, "%s/%d: seen twice", r.Process, r.Delivery)
			}
			d.seen, d.arrival = r.T, &r
			if r.Outer != 0 {
				d.outer = c.delivery(Record{Process: r.Process, Delivery: r.Outer})
				d.outer.inner = d
			}
		case KindTry:
			d := c.delivery(r)
			d.seen, d.arrival, d.try = r.T, &r, true
		case KindTaken:
			c.delivery(r).taken = r.T
		case KindSet:
			if r.Delivery != 0 {
				d := c.delivery(r)
				d.sets = append(d.sets, r.T)
			}
		case KindModel:
			c.Add(BadModel, "%s: %s", r.Key, r.Err)
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
				c.Add(BadHistory, "%s ended without being told to: %s", r.Process, r.Err)
			}
		case KindFault:
			c.faults = append(c.faults, r)
			c.Findings.Faults[r.Fault]++
			if isLoss(r.Fault) || mayBeLoss(r.Fault) {
				c.losses[r.Key] = append(c.losses[r.Key], r)
			}
		case KindImmortal:
			c.Add(BadTTL, "%s: %s", r.Key, r.Err)
		case KindLeftover:
			c.Add(BadLeftover, "%s: %s", r.Key, r.Err)
		case KindGone:
			c.gone[r.Process] = r.T
		case KindEnqueued, KindQueued, KindWrite:
		default:
			d := c.delivery(r)
			c.Events[r.Kind]++
			switch kind := redislock.EventKind(r.Kind); {
			case kind == redislock.EventAcquired:
				d.acquired = append(d.acquired, r)
			case kind == redislock.EventReleased, kind == redislock.EventLost, kind == redislock.EventAbandoned:
				d.ended = append(d.ended, r)
				c.Cycles++
			case isOutcome(r.Kind):
				d.outcomes = append(d.outcomes, r)
			default:
				c.Add(BadHistory, "record of kind %q", r.Kind)
			}
		}
	}
}

// isOutcome reports whether a record of the kind says how a delivery came out.
func isOutcome(kind string) bool {
	switch redislock.EventKind(kind) {
	case redislock.EventRan, redislock.EventSkipped, redislock.EventDone, redislock.EventRequeued,
		redislock.EventArchived, redislock.EventRefused, redislock.EventPassed:
		return true
	}
	return false
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
			c.Add(BadHistory, "%s has no end", d.process)
		case d.seen == 0:
			c.Add(BadHistory, "%s/%d: never seen", d.process, d.n)
		case len(d.outcomes) > 1:
			c.Add(BadBooks, "%s/%d: task %s has %d outcomes", d.process, d.n, d.task, len(d.outcomes))
		case d.try && len(d.outcomes) == 0:
		case len(d.outcomes) == 0 && !killed && !(impatient && c.mayBeUnfinished(d, end.T)):
			c.Add(BadBooks, "%s/%d: task %s has no outcome", d.process, d.n, d.task)
		case len(d.outcomes) == 0:
			c.OpenBooks++
		}
		switch {
		case len(d.ended) > len(d.acquired):
			c.Add(BadBooks, "%s/%d: task %s: %d locks acquired, %d ended", d.process, d.n, d.task, len(d.acquired), len(d.ended))
		case len(d.ended) < len(d.acquired) && !killed && (!impatient || d.exit == nil):
			c.Add(BadBooks, "%s/%d: task %s: %d locks acquired, %d ended", d.process, d.n, d.task, len(d.acquired), len(d.ended))
		case len(d.ended) < len(d.acquired): // or Shutdown did not wait for the reply to a release
			c.OpenBooks++
		}
		ran := slices.ContainsFunc(d.outcomes, func(o Record) bool {
			return o.Kind == string(redislock.EventRan) || o.Kind == string(redislock.EventPassed)
		})
		handled := d.exit != nil || d.inner != nil // the middleware within is the handler of the one around it
		if ran && d.exit != nil && d.exit.Err == "" && d.outcomes[0].Err != "" {
			c.Add(BadBooks, "%s/%d: task %s succeeded, and asynq was told: %s", d.process, d.n, d.task, d.outcomes[0].Err)
		}
		if len(d.outcomes) > 0 && ran != handled {
			c.Add(BadBooks, "%s/%d: task %s: outcome %s, handler ran: %v", d.process, d.n, d.task, d.outcomes[0].Kind, handled)
		}
	}
	c.checkPatience()
}

// mayBeUnfinished reports whether a delivery without an outcome may have been under way at t: one that does not run ends with its
// task, if Redis answers.
func (c *checker) mayBeUnfinished(d *delivery, t int64) bool {
	return d.enter != nil || d.inner != nil || d.seen > t-c.ttl-c.slack || !c.reachable(d.process, t, t)
}

// hungCall is how long a call on a connection that has gone silent lasts: go-redis waits 3 s for a reply.
const hungCall = int64(4 * time.Second)

// checkPatience wants each Shutdown that gave up to have had somebody to wait for, or a call that hung.
func (c *checker) checkPatience() {
	busy := make(map[string]bool) // by process
	for _, d := range c.deliveries {
		just := c.ends[d.process].T - c.slack
		late := func(r Record) bool { return r.T > just }
		if len(d.outcomes) == 0 && !d.try || d.enter != nil && d.exit == nil || len(d.ended) < len(d.acquired) || d.exit != nil && late(*d.exit) ||
			slices.ContainsFunc(d.outcomes, late) || slices.ContainsFunc(d.ended, late) {
			busy[d.process] = true
		}
	}
	for process, end := range c.ends {
		if end.Kind == KindBye && end.Err != "" && !busy[process] && c.reachable(process, end.T-hungCall, end.T) {
			c.Add(BadBooks, "%s: Shutdown lost its patience with nobody: %s", process, end.Err)
		}
	}
}

// checkTasks wants each task done, dropped by the rules, or still in the queue.
func (c *checker) checkTasks(history []Record) {
	type work struct{ key, task string }
	var enqueued []string
	accounted := make(map[string]bool) // by task; a worker may have it before the producer has noted it
	succeeded := make(map[work]bool)
	seen := make(map[string]int)
	last := make(map[string]redislock.EventKind) // outcome of each task
	for _, r := range history {
		if isOutcome(r.Kind) {
			last[r.Task] = redislock.EventKind(r.Kind)
		}
		switch r.Kind {
		case KindSeen:
			if r.Outer == 0 {
				seen[r.Task]++
			}
		case string(redislock.EventRequeued):
			// A try whose task has ended may have got the lock, and then nobody waits for the reply.
			if r.Holder == r.Task && seen[r.Task] == 1 && !strings.Contains(r.Err, "context ended") {
				c.Add(BadSkip, "task %s held up by itself on %s, at its first delivery", r.Task, r.Process)
			}
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
				if r.Holder == r.Task || r.Holder == "" {
					c.Add(BadSkip, "task %s on %s, for %q", r.Task, r.Process, r.Holder)
				}
				if c.mayDrop != nil && !c.mayDrop(r.Type, r.Task) {
					c.Add(BadDrop, "task %s of type %q on %s", r.Task, r.Type, r.Process)
				}
			case redislock.EventDone:
				if !succeeded[work{r.Key, r.Holder}] {
					c.Add(BadMarker, "task %s on %s: the marker of %q at %s, which has not succeeded", r.Task, r.Process, r.Holder, r.Key)
				}
			}
			if r.Err == "" || redislock.EventKind(r.Kind) == redislock.EventSkipped { // a PolicyFunc may skip with asynq.RevokeTask
				accounted[r.Task] = true
			}
		case KindQueued:
			c.Queue[r.State]++
			switch {
			case r.State != "archived":
			case r.Err == "":
				c.Add(BadArchive, "task %s", r.Task)
			case last[r.Task] == redislock.EventRequeued && strings.Contains(r.Err, "redislock:"):
				c.Add(BadArchive, "task %s was to be put back, and asynq archived it: %s", r.Task, r.Err)
			}
			accounted[r.Task] = true
		}
	}
	slices.Sort(enqueued)
	for _, task := range slices.Compact(enqueued) {
		if !accounted[task] {
			c.Add(BadTask, "task %s", task)
		}
	}
}

// gatherRuns pairs each handler's enter and exit with the life of its lock.
func (c *checker) gatherRuns() {
	for _, d := range c.deliveries {
		if d.enter == nil {
			if d.exit != nil {
				c.Add(BadHistory, "%s/%d: an exit without an enter", d.process, d.n)
			}
			continue
		}
		if d.passed() && d.outer == nil {
			continue // what it needs, if anything, is held further up the call chain
		}
		r := &run{Record: *d.enter, from: d.enter.T, to: c.ends[d.process].T}
		r.holdsFileUntil = max(r.to, c.gone[d.process])
		if d.exit != nil {
			r.to, r.holdsFileUntil, r.succeeded = d.exit.T, d.exit.T, d.exit.Err == ""
			if end, ok := c.stopped(r.Process, r.to, r.to+int64(10*time.Millisecond), 0); ok { // before it had let go of the file lock
				r.holdsFileUntil = end
			}
		}
		holder := d // the delivery that has the lock
		if d.outer != nil {
			holder = d.outer
		}
		switch {
		case r.Unlocked: // and checkUnlocked wants a reason
			c.Unlocked++
		case len(holder.acquired) == 1:
			r.acquired = holder.acquired[0].T
			r.asked = max(holder.seen, r.acquired-c.ttl/4)                 // a try that takes longer is given back
			if _, ok := c.stopped(r.Process, r.asked, r.acquired, 0); ok { // before it said that it had the reply
				r.asked = holder.seen
			}
		default:
			c.Add(BadHistory, "%s/%d: a handler under %d locks", d.process, d.n, len(holder.acquired))
		}
		if len(holder.sets) > 0 {
			r.lapses = slices.Max(holder.sets) + c.ttl
		}
		if len(holder.ended) == 1 {
			r.ended, r.endedAs, r.endErr = holder.ended[0].T, redislock.EventKind(holder.ended[0].Kind), holder.ended[0].Err
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
			c.Add(BadHistory, "%s: task %s found the file lock taken, but by nobody known", b.Key, b.Task)
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
	excuse, late := c.excuse(a, from, b.acquired)
	if excuse == "" && b.asked < a.acquired { // the replies may have come in another order than the lock was given
		excuse, late = c.excuse(b, from, a.acquired)
	}
	if late > 0 { // of two that were given the lock around a failover, either may be the one that has lost it
		if other, otherLate := c.excuse(b, from, a.acquired); other == excuse {
			late = min(late, otherLate)
		}
	}
	if a.Unlocked || b.Unlocked {
		excuse, late = ExcuseOpen, 0
	}
	if excuse == "" {
		c.Add(BadOverlap, "%s, for %v: %v, and %v", a.Key, time.Duration(to-from), a, b)
		return
	}
	c.Excused[excuse]++
	c.Longest = max(c.Longest, time.Duration(to-from))
	if late > 0 {
		c.Add(BadNotice, "%s: %s of %s was told %v too late (%s)", a.Key, a.Task, a.Process, time.Duration(late), excuse)
	}
}

// excuse returns what allows run a to be at work still at a time when another has its lock, which it knew to have at given, and
// by how much a was told too late of a pause of its own.
func (c *checker) excuse(a *run, at, given int64) (excuse string, late int64) {
	free := min(at, given) // by then a's key was
	if _, ok := c.lastLoss(a.Key, a.asked, free, isLoss); ok {
		return ExcuseLoss, 0 // checkNotice looks at when it was told
	}
	perhaps, isPerhaps := c.lastLoss(a.Key, a.asked, free, mayBeLoss)
	if isPerhaps {
		late = max(a.told()-c.noticeDue(a, perhaps), 0)
		if late == 0 || perhaps.Until-perhaps.T > c.ttl/2 { // with two primaries for so long, a may be the one that has not lost it
			return ExcuseLoss, 0
		}
	}
	lost := a.endedAs == redislock.EventLost || a.endedAs == redislock.EventAbandoned
	lapsed := given >= a.asked+c.ttl-rounding // the others need its key to have done so
	if a.Deaf && lost && lapsed && a.ended <= at && at >= a.lapses-c.slack {
		return ExcuseDeaf, 0
	}
	if killed := c.ends[a.Process]; killed.Kind == KindKilled && killed.T <= at && at <= c.gone[a.Process] {
		return ExcuseKilled, 0
	}
	if end, ok := c.paused(a.Process, max(a.acquired, at-c.slack), at, c.ttl/2); ok && lapsed {
		return ExcusePause, max(a.told()-end-c.slack, 0)
	}
	// A holder must stop a tenth of a TTL before its key lapses, so only a stall of about that, just before, can carry it
	// further.
	if _, ok := c.stopped(a.Process, max(a.acquired, at-c.ttl/20), at, c.ttl/10-int64(10*time.Millisecond)); ok && lapsed {
		return ExcuseStall, 0
	}
	if isPerhaps {
		return ExcuseLoss, late // nothing else explains it
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
	FaultPressure = "memory pressure" // and what it evicts
	FaultEvict    = "key evicted"
	FaultForward  = "clock forward" // and what that does to the keys
	FaultLapse    = "key lapsed early"
	FaultShorten  = "key lapses sooner"
	FaultBackward = "clock backward"
	FaultFailover = "failover" // to a replica that does not have the latest locks
	FaultSwallow  = "swallow " // and the verb
	FaultOneReply = "silent"
	FaultQueue    = "queue: " // and what happens between asynq and its server
	FaultRestart  = "restart" // of the server, which keeps its keys
	FaultOther    = "other: " // and what else is not in the way of a lock
)

// RigProcess is the one that has the proxies and the servers. Its stalls keep Redis from all.
const RigProcess = "rig"

// isLoss reports whether a fault makes Redis forget its key, or all keys.
func isLoss(fault string) bool {
	switch fault {
	case FaultFlush, FaultDelete, FaultSteal, FaultLossy, FaultEvict, FaultLapse:
		return true
	}
	return false
}

// mayBeLoss reports whether a fault makes Redis forget its key, or some of the keys, unless the holder's next extension comes first.
func mayBeLoss(fault string) bool { return fault == FaultFailover || fault == FaultShorten }

// lossOf finds the last fault by which Redis forgot key, or may have, between the two stamps.
func (c *checker) lossOf(key string, from, to int64) (loss Record, ok bool) {
	return c.lastLoss(key, from, to, func(string) bool { return true })
}

// lastLoss is lossOf for some of the faults.
func (c *checker) lastLoss(key string, from, to int64, is func(fault string) bool) (loss Record, ok bool) {
	for _, losses := range [][]Record{c.losses[""], c.losses[key]} {
		for _, f := range losses {
			if f.Until >= from && f.T <= to && is(f.Fault) && (!ok || f.T >= loss.T) {
				loss, ok = f, true
			}
		}
	}
	return loss, ok
}

// firstLoss finds the first fault by which Redis surely forgot a key that was there at from.
func (c *checker) firstLoss(key string, from, to int64) (loss Record, ok bool) {
	for _, losses := range [][]Record{c.losses[""], c.losses[key]} {
		for _, f := range losses {
			if f.T >= from && f.T <= to && isLoss(f.Fault) && (!ok || f.T < loss.T) {
				loss, ok = f, true
			}
		}
	}
	return loss, ok
}

// checkNotice wants each holder whose lock Redis forgot to know it by its next extension, or by its own deadline where
// something stood between the two.
func (c *checker) checkNotice(runs []*run) {
	for _, a := range runs {
		told := a.told()
		f, ok := c.firstLoss(a.Key, a.acquired, told)
		if !ok || a.Unlocked {
			continue
		}
		if due := c.noticeDue(a, f); told > due {
			c.Add(BadNotice, "%s: %v, %v too late of %s at %d", a.Key, a, time.Duration(told-due), f.Fault, f.T)
		}
	}
}

// checkObeyed wants each handler that looks at its context to end when its lock is told as lost.
func (c *checker) checkObeyed(runs []*run) {
	for _, a := range runs {
		if a.Deaf || a.endedAs != redislock.EventLost || a.to <= a.ended+c.slack {
			continue
		}
		if _, stopped := c.stopped(a.Process, a.ended, a.to, c.ttl/20); !stopped {
			c.Add(BadNotice, "%s: %v went on for %v after its lock was lost", a.Key, a, time.Duration(a.to-a.ended))
		}
	}
}

// checkUnlocked wants a handler without a lock to have neither got one, nor a reason to have got one.
func (c *checker) checkUnlocked(d *delivery) {
	if len(d.acquired) > 0 {
		c.Add(BadBooks, "%s/%d: task %s runs unlocked, and has a lock", d.process, d.n, d.task)
	}
	from, to := d.seen-c.ttl, d.enter.T
	if !c.reachable(d.process, d.seen, to) {
		return
	}
	_, stopped := c.stopped(d.process, from, to, 0)
	troubled := slices.ContainsFunc(c.faults, func(f Record) bool { // a memory that is full refuses, and so may a new primary
		return (f.Fault == FaultFailover || f.Fault == FaultPressure) && f.T <= to && f.Until >= from
	})
	if c.exact || !stopped && !troubled {
		c.Add(BadLoss, "%s/%d: task %s runs unlocked, and Redis was there", d.process, d.n, d.task)
	}
}

// noticeDue is when run a must know at the latest that its lock was lost by f.
func (c *checker) noticeDue(a *run, f Record) int64 {
	told := a.told()
	due := f.Until + c.ttl/3 + c.slack
	if !c.reachable(a.Process, f.T, told) {
		due = f.Until + c.ttl - c.ttl/10 + c.slack
	}
	if end, stopped := c.stopped(a.Process, f.T, told, c.ttl/20); stopped {
		due = max(due, end+c.ttl/3+c.slack)
	}
	return due
}

// reachable reports whether nothing stood between the process and Redis.
func (c *checker) reachable(process string, from, to int64) bool {
	for _, f := range c.faults {
		if f.T > to || f.Until < from-c.ttl {
			continue
		}
		switch {
		case f.Fault == FaultPause, isLoss(f.Fault), mayBeLoss(f.Fault), f.Fault == FaultPressure, f.Fault == FaultForward, f.Fault == FaultBackward,
			strings.HasPrefix(f.Fault, FaultQueue), strings.HasPrefix(f.Fault, FaultOther):
		case f.Process == "" || processOn(f.Process, process):
			return false
		}
	}
	for _, s := range c.stalls[RigProcess] { // through which everything goes
		if s.T <= to && s.Until >= from-c.ttl {
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

// stopped finds a time in which the process did not run, for whichever reason.
func (c *checker) stopped(process string, from, to, least int64) (end int64, ok bool) {
	for _, s := range c.stalls[process] {
		if s.Until-s.T >= least && s.T <= to && s.Until >= from {
			end, ok = max(end, s.Until), true
		}
	}
	if e, paused := c.paused(process, from, to, least); paused {
		return max(end, e), true
	}
	return end, ok
}

// checkTwice wants no run while the marker of an earlier one stands, that is from its confirmed release on until its time,
// which began at the end of the run or later, is over.
func (c *checker) checkTwice(runs []*run) {
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
			c.Add(BadTwice, "%s: %s of %s was done at %d, and %s of %s ran %v later", a.Key, a.Task, a.Process, a.to, b.Task, b.Process, time.Duration(b.acquired-a.to))
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
