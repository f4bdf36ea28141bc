package history

import (
	"cmp"
	"slices"
	"testing"
	"time"
)

// The histories of these tests are made by hand. Times are in milliseconds, the TTL is a second.

var terms = Terms{TTL: time.Second, Slack: 250 * time.Millisecond, MayDrop: func(taskType, _ string) bool { return taskType != "retry" }}

func ms(t int64) int64 { return t * int64(time.Millisecond) }

// turn is a delivery that does everything right, with its task's enqueueing. Its lock's life ends 1 ms after its handler.
func turn(process string, n int64, task string, from, to int64) []Record {
	r := Record{Process: process, Delivery: n, Task: task, Key: "k"}
	with := func(t int64, kind string) Record {
		r := r
		r.T, r.Kind = ms(t), kind
		return r
	}
	return []Record{
		{T: ms(from - 3), Kind: KindEnqueued, Process: "rig", Task: task},
		with(from-2, KindSeen),
		with(from-1, "acquired"),
		with(from, KindEnter),
		with(to, KindExit),
		with(to+1, "released"),
		with(to+2, "ran"),
	}
}

// unrun is a delivery that does not run.
func unrun(process string, n int64, task string, t int64, outcome, holder string) []Record {
	return []Record{
		{T: ms(t - 1), Kind: KindEnqueued, Process: "rig", Task: task},
		{T: ms(t), Kind: KindSeen, Process: process, Delivery: n, Task: task},
		{T: ms(t + 1), Kind: outcome, Process: process, Delivery: n, Task: task, Key: "k", Holder: holder},
	}
}

func queued(task, state, err string) []Record {
	return []Record{{T: ms(9000), Kind: KindQueued, Process: "rig", Task: task, State: state, Err: err}}
}

func fault(name, process, key string, from, to int64) []Record {
	return []Record{{T: ms(from), Until: ms(to), Kind: KindFault, Fault: name, Process: process, Key: key}}
}

func end(kind, process string, t int64, err string) []Record {
	return []Record{{T: ms(t), Kind: kind, Process: process, Err: err}}
}

// nested is a turn whose middleware is mounted twice: delivery n has the lock, n+1 is within it.
func nested(process string, n int64, task string, from, to int64) []Record {
	records := turn(process, n, task, from, to)
	for i := range records {
		switch records[i].Kind {
		case KindEnter, KindExit:
			records[i].Delivery = n + 1
		}
	}
	inner := Record{Process: process, Delivery: n + 1, Task: task, Key: "k"}
	seen, passed := inner, inner
	seen.T, seen.Kind, seen.Outer = ms(from)-1, KindSeen, n
	passed.T, passed.Kind = ms(to)+1, "passed"
	return append(records, seen, passed)
}

// unlocked is a turn of a handler that Redis has kept from its lock.
func unlocked(process string, n int64, task string, from, to int64) []Record {
	records := without(turn(process, n, task, from, to), "acquired", "released")
	for i := range records {
		if k := records[i].Kind; k == KindEnter || k == KindExit || k == "ran" {
			records[i].Unlocked = true
		}
	}
	return records
}

// set changes the records of a kind.
func set(records []Record, kind string, change func(*Record)) []Record {
	for i := range records {
		if records[i].Kind == kind {
			change(&records[i])
		}
	}
	return records
}

func without(records []Record, kinds ...string) []Record {
	return slices.DeleteFunc(records, func(r Record) bool { return slices.Contains(kinds, r.Kind) })
}

// verdict checks a history and wants a violation of one kind, or none, and one overlap with this excuse, if any.
func verdict(t *testing.T, history []Record, terms Terms, bad, excuse string) Findings {
	t.Helper()
	f := Check(inOrder(history), terms)
	if bad == "" && len(f.Violations) > 0 {
		t.Errorf("a good history: %v", f.Violations)
	}
	if bad != "" && f.Count(bad) == 0 {
		t.Errorf("violations %v, want kind %q", f.Violations, bad)
	}
	if excuse != "" && f.Excused[excuse] != 1 {
		t.Errorf("excused %v, want one %q", f.Excused, excuse)
	}
	return f
}

func inOrder(parts ...[]Record) []Record {
	all := slices.Concat(parts...)
	slices.SortStableFunc(all, func(a, b Record) int { return cmp.Compare(a.T, b.T) })
	return all
}

func TestCheck(t *testing.T) {
	byes := slices.Concat(end(KindBye, "w0-1", 8000, ""), end(KindBye, "w1-1", 8000, ""))
	deaf := func(r *Record) { r.Deaf = true }
	lostAt := func(t int64) func(*Record) {
		return func(r *Record) { r.Kind, r.T = "lost", ms(t) }
	}
	failed := func(r *Record) { r.Err = "failed" }
	at := func(t int64) func(*Record) { return func(r *Record) { r.T = ms(t) } }
	once := func(r *Record) { r.DoneFor = ms(2000) }
	for name, test := range map[string]struct {
		history []Record
		bad     string // kind of violation, empty: none
		excuse  string
	}{
		"one after the other":   {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 203, 300), byes)},
		"enqueueing noted late": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), KindEnqueued, func(r *Record) { r.T = ms(300) }), byes)},
		"requeued, then run":    {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), turn("w0-1", 2, "a", 100, 200), byes)},
		"skipped":               {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), unrun("w1-1", 1, "b", 150, "skipped", "a"), byes)},
		"done": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), KindEnter, once),
			unrun("w1-1", 1, "b", 250, "done", "a"), byes)},
		"still in the queue":  {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), queued("a", "retry", ""), byes)},
		"archived for reason": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "archived", "b"), queued("a", "archived", "held"), byes)},
		"killed at work": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), KindExit, "released", "ran"), end(KindKilled, "w0-1", 150, ""),
			queued("a", "active", ""), turn("w1-1", 1, "b", 1100, 1200), byes[1:])},
		"shut down at work": {history: slices.Concat(set(without(turn("w0-1", 1, "a", 100, 200), KindExit, "ran"), "released", func(r *Record) { r.Kind = "abandoned" }),
			end(KindBye, "w0-1", 300, "deadline exceeded"), queued("a", "pending", ""), byes[1:])},

		"overlap":              {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 150, 250), byes), bad: BadOverlap},
		"overlap in a process": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w0-1", 2, "b", 150, 250), byes), bad: BadOverlap},
		"overlap of one task":  {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "a", 150, 250), byes), bad: BadOverlap},
		"overlap with the killed": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), KindExit, "released", "ran"), end(KindKilled, "w0-1", 150, ""),
			queued("a", "active", ""), turn("w1-1", 1, "b", 140, 200), byes[1:]), bad: BadOverlap},
		"file lock taken": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200),
			set(turn("w1-1", 1, "b", 203, 300), KindEnter, func(r *Record) { r.Clash = true }), byes), bad: BadOverlap},
		"overlap after another key was lost": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 150, 250),
			fault(FaultDelete, "", "other", 140, 141), byes), bad: BadOverlap},
		"overlap after a pause of another process": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2200), turn("w1-1", 1, "b", 2000, 2100),
			fault(FaultPause, "w2-1", "", 150, 2150), byes), bad: BadOverlap},
		"overlap after a short pause": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2200), turn("w1-1", 1, "b", 2000, 2100),
			fault(FaultPause, "w0-1", "", 150, 350), byes), bad: BadOverlap},
		"overlap of the deaf who was not told": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), KindEnter, deaf),
			turn("w1-1", 1, "b", 2000, 2100), byes), bad: BadOverlap},
		"overlap after a cut": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), "released", lostAt(2050)),
			turn("w1-1", 1, "b", 2000, 2100), fault("cut", "w0", "", 900, 2000), byes), bad: BadOverlap},

		"overlap after a loss": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 500), "released", lostAt(499)),
			turn("w1-1", 1, "b", 300, 400), fault(FaultFlush, "", "", 200, 201), byes), excuse: ExcuseLoss},
		"a loss before the reply to the acquire": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 300), KindSeen, func(r *Record) { r.T = ms(50) }),
			turn("w1-1", 1, "b", 150, 200), fault(FaultFlush, "", "", 60, 61), byes), excuse: ExcuseLoss},
		"a loss before the reply, which comes after the next holder's": {history: slices.Concat(turn("w0-1", 1, "a", 150, 250), fault(FaultDelete, "", "k", 100, 101),
			set(turn("w1-1", 1, "b", 152, 200), KindSeen, func(r *Record) { r.T = ms(50) }), byes), excuse: ExcuseLoss},
		"a loss before both": {history: slices.Concat(turn("w0-1", 1, "a", 150, 250), fault(FaultDelete, "", "k", 100, 101),
			turn("w1-1", 1, "b", 152, 200), byes), bad: BadOverlap},
		"told late of a loss": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2000), "released", lostAt(1900)),
			turn("w1-1", 1, "b", 300, 400), fault(FaultFlush, "", "", 200, 201), byes), excuse: ExcuseLoss, bad: BadNotice},
		"never told of a theft": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(FaultSteal, "", "k", 200, 201), byes), bad: BadNotice},
		"never told, with a loss every while": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(FaultFlush, "", "", 300, 301),
			fault(FaultFlush, "", "", 700, 701), fault(FaultFlush, "", "", 1100, 1101), fault(FaultFlush, "", "", 1500, 1501), fault(FaultFlush, "", "", 1900, 1901), byes), bad: BadNotice},
		"told after its deadline, Redis being down": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 1401), "released", lostAt(1400)),
			fault(FaultLossy, "", "", 200, 201), fault("redis down", "", "", 200, 3000), byes), bad: BadNotice},
		"told by its deadline, Redis being down": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 1101), "released", lostAt(1100)),
			fault(FaultLossy, "", "", 200, 201), fault("redis down", "", "", 200, 3000), byes)},
		"the last of several losses counts": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2001), "released", lostAt(2000)),
			turn("w1-1", 1, "b", 1950, 2050), fault(FaultFlush, "", "", 90, 98), fault(FaultFlush, "", "", 1900, 1901), byes), excuse: ExcuseLoss},
		"overlap after a pause": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), "released", lostAt(2199)),
			turn("w1-1", 1, "b", 2000, 2100), fault(FaultPause, "w0-1", "", 150, 2180), byes), excuse: ExcusePause},
		"told late of a pause": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 4000), "released", lostAt(3999)),
			turn("w1-1", 1, "b", 2000, 2100), fault(FaultPause, "w0-1", "", 150, 2180), byes), excuse: ExcusePause, bad: BadNotice},
		"paused before it entered": {history: slices.Concat(turn("w1-1", 1, "b", 2000, 2100), fault(FaultPause, "w0-1", "", 100, 2049),
			set(set(set(turn("w0-1", 1, "a", 2050, 2060), KindSeen, at(80)), "acquired", at(90)), "released", lostAt(2055)), byes), excuse: ExcusePause},
		"overlap after a stall": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), "released", lostAt(2199)), turn("w1-1", 1, "b", 2190, 2300),
			[]Record{{T: ms(2080), Until: ms(2195), Kind: KindStall, Process: "w0-1"}}, byes), excuse: ExcuseStall},
		"overlap of the deaf": {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 2200), KindEnter, deaf), "released", lostAt(1000)),
			turn("w1-1", 1, "b", 2000, 2100), byes), excuse: ExcuseDeaf},

		"file lock of one that was paused between its exit and letting go": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), "released", lostAt(2199)),
			set(turn("w1-1", 1, "b", 1500, 1600), KindEnter, func(r *Record) { r.Clash = true }), fault(FaultPause, "w0-1", "", 202, 2180), byes), excuse: ExcusePause},
		"two are given the lock around a failover, and the second has lost it": {history: slices.Concat(turn("w0-1", 1, "a", 202, 2000),
			turn("w1-1", 1, "b", 203, 250), fault(FaultFailover, "", "", 190, 220), byes), excuse: ExcuseLoss},
		"overlap after an eviction": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 500), "released", lostAt(499)),
			turn("w1-1", 1, "b", 300, 400), fault(FaultEvict, "", "k", 200, 210), fault(FaultPressure, "", "", 150, 600), byes), excuse: ExcuseLoss},
		"overlap after the eviction of another key": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 500), "released", lostAt(499)),
			turn("w1-1", 1, "b", 300, 400), fault(FaultEvict, "", "other", 200, 210), fault(FaultPressure, "", "", 150, 600), byes), bad: BadOverlap},
		"never told of an eviction": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(FaultEvict, "", "k", 200, 210),
			fault(FaultPressure, "", "", 150, 1900), byes), bad: BadNotice},
		"overlap under a full memory": {history: slices.Concat(turn("w0-1", 1, "a", 100, 500), turn("w1-1", 1, "b", 300, 400),
			fault("out of memory", "", "", 150, 600), byes), bad: BadOverlap},
		"overlap with a read-only server": {history: slices.Concat(turn("w0-1", 1, "a", 100, 500), turn("w1-1", 1, "b", 300, 400),
			fault("read-only replica", "", "", 150, 600), byes), bad: BadOverlap},
		"overlap after a failover": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 500), "released", lostAt(499)),
			turn("w1-1", 1, "b", 300, 400), fault(FaultFailover, "", "", 200, 210), byes), excuse: ExcuseLoss},
		"told late of a failover": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2000), "released", lostAt(1900)),
			turn("w1-1", 1, "b", 300, 400), fault(FaultFailover, "", "", 200, 210), byes), excuse: ExcuseLoss, bad: BadNotice},
		"a failover that takes long": {history: slices.Concat(turn("w0-1", 1, "a", 100, 3000),
			turn("w1-1", 1, "b", 1300, 1400), fault(FaultFailover, "", "", 200, 1500), byes), excuse: ExcuseLoss},
		"a failover to a replica that has the lock": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(FaultFailover, "", "", 200, 210), byes)},
		"overlap after a jump forward": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 500), "released", lostAt(499)),
			turn("w1-1", 1, "b", 300, 400), fault(FaultForward, "", "", 200, 210), fault(FaultLapse, "", "k", 200, 210), byes), excuse: ExcuseLoss},
		"never told of a jump forward": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(FaultForward, "", "", 200, 210),
			fault(FaultLapse, "", "k", 200, 210), byes), bad: BadNotice},
		"a jump forward that makes another lock lapse": {history: slices.Concat(turn("w0-1", 1, "a", 100, 500), turn("w1-1", 1, "b", 300, 400),
			fault(FaultForward, "", "", 200, 210), fault(FaultLapse, "", "other", 200, 210), byes), bad: BadOverlap},
		"a shorter life, extended in time": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(FaultShorten, "", "k", 200, 210), byes)},
		"a shorter life, extended in time, and deaf after another loss": {history: slices.Concat(
			set(set(turn("w0-1", 1, "a", 100, 3000), KindEnter, deaf), "released", lostAt(2000)),
			turn("w1-1", 1, "b", 2500, 2600), fault(FaultShorten, "", "k", 200, 210), fault("hang", "w0", "", 1000, 2400), byes), excuse: ExcuseDeaf},
		"a shorter life, told late": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2000), "released", lostAt(1900)),
			turn("w1-1", 1, "b", 400, 500), fault(FaultShorten, "", "k", 200, 210), byes), excuse: ExcuseLoss, bad: BadNotice},
		"overlap after a jump back": {history: slices.Concat(turn("w0-1", 1, "a", 100, 500), turn("w1-1", 1, "b", 300, 400),
			fault(FaultBackward, "", "", 200, 210), byes), bad: BadOverlap},
		"never told of a loss, with the queue's network cut": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(FaultDelete, "", "k", 200, 210),
			fault(FaultQueue+"cut", "w0", "", 150, 2100), byes), bad: BadNotice},
		"told by its deadline, the rig being slow": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 1101), "released", lostAt(1100)),
			fault(FaultDelete, "", "k", 200, 201), []Record{{T: ms(300), Until: ms(700), Kind: KindStall, Process: RigProcess}}, byes)},
		"redelivered when the lease has expired": {history: slices.Concat(turn("w0-1", 1, "a", 100, 500), unrun("w1-1", 1, "a", 300, "requeued", "a"),
			turn("w1-1", 2, "a", 700, 800), fault(FaultQueue+"leases expired", "w2", "", 200, 201), byes)},
		"nested": {history: slices.Concat(nested("w0-1", 1, "a", 100, 200), nested("w1-1", 1, "b", 203, 300), byes)},
		"nested, and refused within": {history: slices.Concat(without(set(nested("w0-1", 1, "a", 100, 200), "passed", func(r *Record) { r.Kind = "refused" }),
			KindEnter, KindExit), turn("w0-1", 3, "a", 300, 400), byes)},
		"nested, and run twice at once": {history: slices.Concat(nested("w0-1", 1, "a", 100, 200), nested("w1-1", 1, "b", 150, 300), byes), bad: BadOverlap},
		"unlocked":                      {history: slices.Concat(unlocked("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 150, 300), fault("cut", "w0", "", 50, 90), byes), excuse: ExcuseOpen},
		"unlocked after a lock":         {history: slices.Concat(turn("w1-1", 1, "b", 150, 300), unlocked("w0-1", 1, "a", 200, 250), fault("cut", "w0", "", 50, 90), byes), excuse: ExcuseOpen},
		"unlocked for nothing":          {history: slices.Concat(unlocked("w0-1", 1, "a", 100, 200), fault("cut", "w1", "", 50, 90), byes), bad: BadLoss},
		"unlocked long after a cut":     {history: slices.Concat(unlocked("w0-1", 1, "a", 2000, 2100), fault("cut", "w0", "", 50, 90), byes), bad: BadLoss},
		"unlocked in a failover":        {history: slices.Concat(unlocked("w0-1", 1, "a", 100, 200), fault(FaultFailover, "", "", 50, 90), byes)},
		"unlocked in a full memory":     {history: slices.Concat(unlocked("w0-1", 1, "a", 100, 200), fault(FaultPressure, "", "", 50, 90), byes)},
		"unlocked after a pause":        {history: slices.Concat(unlocked("w0-1", 1, "a", 1100, 1200), fault(FaultPause, "w0-1", "", 50, 1097), byes)},
		"unlocked after a stall":        {history: slices.Concat(unlocked("w0-1", 1, "a", 100, 200), []Record{{T: ms(50), Until: ms(90), Kind: KindStall, Process: "w0-1"}}, byes)},

		"overlap, and a loss once the next holder was there": {history: slices.Concat(turn("w0-1", 1, "a", 100, 400), set(set(turn("w1-1", 1, "b", 300, 400), KindSeen, at(190)), "acquired", at(200)),
			fault(FaultFlush, "", "", 250, 251), byes), bad: BadOverlap},
		"overlap after a pause, before the key can have lapsed": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 1200), "released", lostAt(1199)),
			turn("w1-1", 1, "b", 800, 1100), fault(FaultPause, "w0-1", "", 150, 1180), byes), bad: BadOverlap},
		"overlap after a stall, before the key can have lapsed": {history: slices.Concat(turn("w0-1", 1, "a", 100, 500), turn("w1-1", 1, "b", 400, 600),
			[]Record{{T: ms(300), Until: ms(420), Kind: KindStall, Process: "w0-1"}}, byes), bad: BadOverlap},
		"overlap of the deaf, before the key can have lapsed": {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 900), KindEnter, deaf), "released", lostAt(300)),
			turn("w1-1", 1, "b", 400, 500), byes), bad: BadOverlap},
		"went on after its lock was lost": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 600), "released", lostAt(300)),
			fault(FaultDelete, "", "k", 200, 201), byes), bad: BadNotice},
		"went on for a moment": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 500), "released", lostAt(300)), fault(FaultDelete, "", "k", 200, 201), byes)},
		"went on, being deaf":  {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 600), KindEnter, deaf), "released", lostAt(300)), fault(FaultDelete, "", "k", 200, 201), byes)},
		"went on after a pause": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 900), "released", lostAt(300)), fault(FaultDelete, "", "k", 200, 201),
			fault(FaultPause, "w0-1", "", 310, 880), byes)},
		"to be put back, and archived": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), queued("a", "archived", "redislock: held"), byes), bad: BadArchive},

		"dropped against its policy": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200),
			set(unrun("w1-1", 1, "b", 150, "skipped", "a"), "skipped", func(r *Record) { r.Type = "retry" }), byes), bad: BadDrop},
		"a task vanishes":                         {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), byes), bad: BadTask},
		"never delivered":                         {history: slices.Concat(turn("w0-1", 1, "a", 100, 200)[:1], byes), bad: BadTask},
		"failed and not kept":                     {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 200), KindExit, failed), "ran", failed), byes), bad: BadTask},
		"archived for nothing":                    {history: slices.Concat(unrun("w0-1", 1, "a", 50, "archived", "b"), queued("a", "archived", ""), byes), bad: BadArchive},
		"skipped by itself":                       {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), unrun("w1-1", 1, "a", 150, "skipped", "a"), byes), bad: BadSkip},
		"skipped for nobody":                      {history: slices.Concat(unrun("w0-1", 1, "a", 50, "skipped", ""), byes), bad: BadSkip},
		"held up by itself at its first delivery": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "a"), queued("a", "retry", ""), byes), bad: BadSkip},
		"held up by itself within another middleware": {history: slices.Concat(set(without(nested("w0-1", 1, "a", 100, 200), KindEnter, KindExit), "passed",
			func(r *Record) { r.Kind, r.Holder = "requeued", "a" }), byes), bad: BadSkip},
		"held up by a try of its own that its context ended": {history: slices.Concat(set(unrun("w0-1", 1, "a", 50, "requeued", "a"), "requeued",
			func(r *Record) { r.Err = "redislock: context ended" }), queued("a", "archived", "max retry"), byes)},
		"marker of a failure": {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 200), KindExit, failed), "ran", failed), queued("a", "retry", "failed"),
			unrun("w1-1", 1, "b", 250, "done", "a"), byes), bad: BadMarker},
		"run again within done-for": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), KindEnter, once),
			set(turn("w1-1", 1, "b", 1500, 1600), KindEnter, once), byes), bad: BadTwice},
		"run again after done-for": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), KindEnter, once),
			set(turn("w1-1", 1, "b", 2300, 2400), KindEnter, once), byes)},
		"run again, marker not confirmed": {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 200), KindEnter, once), "released", failed),
			set(turn("w1-1", 1, "b", 1500, 1600), KindEnter, once), byes)},
		"run again, marker flushed": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), KindEnter, once),
			set(turn("w1-1", 1, "b", 1500, 1600), KindEnter, once), fault(FaultFlush, "", "", 1000, 1001), byes), excuse: ExcuseLoss},
		"key without TTL":   {history: slices.Concat(end(KindImmortal, "rig", 500, "TTL -1"), byes), bad: BadTTL},
		"key left behind":   {history: slices.Concat(end(KindLeftover, "rig", 9500, "value"), byes), bad: BadLeftover},
		"no outcome":        {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "ran"), queued("a", "active", ""), byes), bad: BadBooks},
		"two outcomes":      {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), unrun("w0-1", 1, "a", 201, "done", "a")[2:], byes), bad: BadBooks},
		"a lock never ends": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "released"), byes), bad: BadBooks},
		"a lock ends twice": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w0-1", 1, "a", 100, 200)[5:6], byes), bad: BadBooks},
		"a lock never ends at an impatient shutdown": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), KindExit, "released", "ran"),
			end(KindBye, "w0-1", 300, "deadline exceeded"), queued("a", "pending", ""), byes[1:]), bad: BadBooks},
		"a shutdown loses its patience with nobody": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200),
			end(KindBye, "w0-1", 2000, "deadline exceeded"), byes[1:]), bad: BadBooks},
		"a shutdown loses its patience with one that ends just then": {history: slices.Concat(turn("w0-1", 1, "a", 100, 1900),
			end(KindBye, "w0-1", 2000, "deadline exceeded"), byes[1:])},
		"a shutdown loses its patience with Redis": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), fault("cut", "w0", "", 300, 1900),
			end(KindBye, "w0-1", 2000, "deadline exceeded"), byes[1:])},
		"no outcome at an impatient shutdown, long after": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b")[:2], queued("a", "active", ""),
			end(KindBye, "w0-1", 2000, "deadline exceeded"), byes[1:]), bad: BadBooks},
		"no outcome at an impatient shutdown, shortly after": {history: slices.Concat(unrun("w0-1", 1, "a", 1500, "requeued", "b")[:2], queued("a", "active", ""),
			end(KindBye, "w0-1", 2000, "deadline exceeded"), byes[1:])},
		"no outcome at an impatient shutdown, in a cut": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b")[:2], queued("a", "active", ""),
			fault("cut", "w0", "", 300, 1900), end(KindBye, "w0-1", 2000, "deadline exceeded"), byes[1:])},
		"a release in flight at an impatient shutdown": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "released"),
			end(KindBye, "w0-1", 300, "deadline exceeded"), byes[1:])},
		"file lock of a deaf handler, whose process takes its time to die": {history: slices.Concat(
			set(set(without(turn("w0-1", 1, "a", 100, 200), KindExit, "ran"), KindEnter, deaf), "released", lostAt(1000)), end(KindKilled, "w0-1", 1900, ""),
			set(turn("w1-1", 1, "b", 1910, 2000), KindEnter, func(r *Record) { r.Clash = true }), end(KindGone, "w0-1", 1950, ""),
			queued("a", "active", ""), byes[1:]), excuse: ExcuseDeaf},
		"file lock of a process that takes its time to die": {history: slices.Concat(
			without(turn("w0-1", 1, "a", 100, 200), KindExit, "released", "ran"), end(KindKilled, "w0-1", 150, ""),
			set(turn("w1-1", 1, "b", 1110, 1200), KindEnter, func(r *Record) { r.Clash = true }), end(KindGone, "w0-1", 1150, ""),
			queued("a", "active", ""), byes[1:]), excuse: ExcuseKilled},
		"file lock of a process that was gone": {history: slices.Concat(
			without(turn("w0-1", 1, "a", 100, 200), KindExit, "released", "ran"), end(KindKilled, "w0-1", 150, ""), end(KindGone, "w0-1", 1100, ""),
			set(turn("w1-1", 1, "b", 1110, 1200), KindEnter, func(r *Record) { r.Clash = true }),
			queued("a", "active", ""), byes[1:]), bad: BadOverlap},
		"a release that takes longer than the handler, after a loss": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 210), "released",
			func(r *Record) { r.T = ms(2000) }), fault(FaultLossy, "", "", 200, 201), byes)},
		"ran without a handler":       {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), KindEnter, KindExit), byes), bad: BadBooks},
		"a handler without a lock":    {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "acquired", "released"), byes), bad: BadHistory},
		"a process that died alone":   {history: slices.Concat(end(KindDied, "w0-1", 100, "panic"), byes[1:]), bad: BadHistory},
		"a process without an end":    {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), byes[1:]), bad: BadHistory},
		"a record nobody understands": {history: slices.Concat(end("surprise", "w0-1", 100, ""), byes), bad: BadHistory},
	} {
		t.Run(name, func(t *testing.T) {
			f := verdict(t, test.history, terms, test.bad, test.excuse)
			if test.excuse == "" && len(f.Excused) > 0 {
				t.Errorf("excused %v, want nothing", f.Excused)
			}
		})
	}
}

func TestCheckCounts(t *testing.T) {
	history := slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w0-1", 2, "b", 300, 400), unrun("w0-1", 3, "c", 350, "requeued", "b"),
		queued("c", "retry", ""), end(KindBye, "w0-1", 8000, ""))
	f := Check(history, terms)
	if f.Cycles != 2 || f.Runs != 2 || f.Enqueued != 3 || f.Queue["retry"] != 1 || f.Events["requeued"] != 1 || len(f.Violations) > 0 {
		t.Errorf("%+v", f)
	}
}

// TestHistory writes from many goroutines and reads it back in order.
func TestHistory(t *testing.T) {
	dir := t.TempDir()
	h, err := Create(dir, "w0-1")
	if err != nil {
		t.Fatal(err)
	}
	const writers, each = 8, 100
	done := make(chan struct{})
	for range writers {
		go func() {
			for range each {
				h.Add(Record{Kind: KindSeen, Err: "ünïcode \n"})
			}
			done <- struct{}{}
		}()
	}
	for range writers {
		<-done
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	all, err := ReadDir(dir)
	if err != nil || len(all) != writers*each {
		t.Fatalf("%d records, %v", len(all), err)
	}
	if !slices.IsSortedFunc(all, func(a, b Record) int { return int(a.T - b.T) }) {
		t.Error("not in the order of their stamps")
	}
	if h.Add(Record{Kind: KindSeen}); !h.failed.Load() {
		t.Error("a record that could not be written went unnoticed")
	}
}
