package main

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// The histories of these tests are made by hand. Times are in milliseconds, the TTL is a second.

func ms(t int64) int64 { return t * int64(time.Millisecond) }

// turn is a delivery that does everything right, with its task's enqueueing. Its lock's life ends 1 ms after its handler.
func turn(process string, n int64, task string, from, to int64) []record {
	r := record{Process: process, Delivery: n, Task: task, Key: "k"}
	with := func(t int64, kind string) record {
		r := r
		r.T, r.Kind = ms(t), kind
		return r
	}
	return []record{
		{T: ms(from - 3), Kind: kindEnqueued, Process: "rig", Task: task},
		with(from-2, kindSeen),
		with(from-1, "acquired"),
		with(from, kindEnter),
		with(to, kindExit),
		with(to+1, "released"),
		with(to+2, "ran"),
	}
}

// unrun is a delivery that does not run.
func unrun(process string, n int64, task string, t int64, outcome, holder string) []record {
	return []record{
		{T: ms(t - 1), Kind: kindEnqueued, Process: "rig", Task: task},
		{T: ms(t), Kind: kindSeen, Process: process, Delivery: n, Task: task},
		{T: ms(t + 1), Kind: outcome, Process: process, Delivery: n, Task: task, Key: "k", Holder: holder},
	}
}

func queued(task, state, err string) []record {
	return []record{{T: ms(9000), Kind: kindQueued, Process: "rig", Task: task, State: state, Err: err}}
}

func fault(name, process, key string, from, to int64) []record {
	return []record{{T: ms(from), Until: ms(to), Kind: kindFault, Fault: name, Process: process, Key: key}}
}

func end(kind, process string, t int64, err string) []record {
	return []record{{T: ms(t), Kind: kind, Process: process, Err: err}}
}

// set changes the records of a kind.
func set(records []record, kind string, change func(*record)) []record {
	for i := range records {
		if records[i].Kind == kind {
			change(&records[i])
		}
	}
	return records
}

func without(records []record, kinds ...string) []record {
	return slices.DeleteFunc(records, func(r record) bool { return slices.Contains(kinds, r.Kind) })
}

func TestCheck(t *testing.T) {
	byes := slices.Concat(end(kindBye, "w0-1", 8000, ""), end(kindBye, "w1-1", 8000, ""))
	deaf := func(r *record) { r.Deaf = true }
	lostAt := func(t int64) func(*record) {
		return func(r *record) { r.Kind, r.T = "lost", ms(t) }
	}
	failed := func(r *record) { r.Err = "failed" }
	once := func(r *record) { r.DoneFor = ms(2000) }
	for name, test := range map[string]struct {
		history []record
		bad     string // kind of violation, empty: none
		excuse  string
	}{
		"one after the other":   {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 203, 300), byes)},
		"enqueueing noted late": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), kindEnqueued, func(r *record) { r.T = ms(300) }), byes)},
		"requeued, then run":    {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), turn("w0-1", 2, "a", 100, 200), byes)},
		"skipped":               {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), unrun("w1-1", 1, "b", 150, "skipped", "a"), byes)},
		"done": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), kindEnter, once),
			unrun("w1-1", 1, "b", 250, "done", "a"), byes)},
		"still in the queue":  {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), queued("a", "retry", ""), byes)},
		"archived for reason": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "archived", "b"), queued("a", "archived", "held"), byes)},
		"killed at work": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), kindExit, "released", "ran"), end(kindKilled, "w0-1", 150, ""),
			queued("a", "active", ""), turn("w1-1", 1, "b", 1100, 1200), byes[1:])},
		"shut down at work": {history: slices.Concat(set(without(turn("w0-1", 1, "a", 100, 200), kindExit, "ran"), "released", func(r *record) { r.Kind = "abandoned" }),
			end(kindBye, "w0-1", 300, "deadline exceeded"), queued("a", "pending", ""), byes[1:])},

		"overlap":              {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 150, 250), byes), bad: badOverlap},
		"overlap in a process": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w0-1", 2, "b", 150, 250), byes), bad: badOverlap},
		"overlap of one task":  {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "a", 150, 250), byes), bad: badOverlap},
		"overlap with the killed": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), kindExit, "released", "ran"), end(kindKilled, "w0-1", 150, ""),
			queued("a", "active", ""), turn("w1-1", 1, "b", 140, 200), byes[1:]), bad: badOverlap},
		"file lock taken": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200),
			set(turn("w1-1", 1, "b", 203, 300), kindEnter, func(r *record) { r.Clash = true }), byes), bad: badOverlap},
		"overlap after another key was lost": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 150, 250),
			fault(faultDelete, "", "other", 140, 141), byes), bad: badOverlap},
		"overlap after a pause of another process": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2200), turn("w1-1", 1, "b", 2000, 2100),
			fault(faultPause, "w2-1", "", 150, 2150), byes), bad: badOverlap},
		"overlap after a short pause": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2200), turn("w1-1", 1, "b", 2000, 2100),
			fault(faultPause, "w0-1", "", 150, 350), byes), bad: badOverlap},
		"overlap of the deaf who was not told": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), kindEnter, deaf),
			turn("w1-1", 1, "b", 2000, 2100), byes), bad: badOverlap},
		"overlap after a cut": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), "released", lostAt(2050)),
			turn("w1-1", 1, "b", 2000, 2100), fault("cut", "w0", "", 900, 2000), byes), bad: badOverlap},

		"overlap after a loss": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 500), "released", lostAt(499)),
			turn("w1-1", 1, "b", 300, 400), fault(faultFlush, "", "", 200, 201), byes), excuse: excuseLoss},
		"a loss before the reply to the acquire": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 300), kindSeen, func(r *record) { r.T = ms(50) }),
			turn("w1-1", 1, "b", 150, 200), fault(faultFlush, "", "", 60, 61), byes), excuse: excuseLoss},
		"told late of a loss": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2000), "released", lostAt(1900)),
			turn("w1-1", 1, "b", 300, 400), fault(faultFlush, "", "", 200, 201), byes), excuse: excuseLoss, bad: badNotice},
		"never told of a theft": {history: slices.Concat(turn("w0-1", 1, "a", 100, 2000), fault(faultSteal, "", "k", 200, 201), byes), bad: badNotice},
		"told by its deadline, Redis being down": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 1101), "released", lostAt(1100)),
			fault(faultLossy, "", "", 200, 201), fault("redis down", "", "", 200, 3000), byes)},
		"the last of several losses counts": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2001), "released", lostAt(2000)),
			turn("w1-1", 1, "b", 1950, 2050), fault(faultFlush, "", "", 90, 98), fault(faultFlush, "", "", 1900, 1901), byes), excuse: excuseLoss},
		"overlap after a pause": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), "released", lostAt(2199)),
			turn("w1-1", 1, "b", 2000, 2100), fault(faultPause, "w0-1", "", 150, 2180), byes), excuse: excusePause},
		"told late of a pause": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 4000), "released", lostAt(3999)),
			turn("w1-1", 1, "b", 2000, 2100), fault(faultPause, "w0-1", "", 150, 2180), byes), excuse: excusePause, bad: badNotice},
		"paused before it entered": {history: slices.Concat(turn("w1-1", 1, "b", 2000, 2100), fault(faultPause, "w0-1", "", 100, 2049),
			set(set(turn("w0-1", 1, "a", 2050, 2060), "acquired", func(r *record) { r.T = ms(90) }), "released", lostAt(2055)), byes), excuse: excusePause},
		"overlap after a stall": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 2200), "released", lostAt(2199)), turn("w1-1", 1, "b", 2190, 2300),
			[]record{{T: ms(2080), Until: ms(2195), Kind: kindStall, Process: "w0-1"}}, byes), excuse: excuseStall},
		"overlap of the deaf": {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 2200), kindEnter, deaf), "released", lostAt(1000)),
			turn("w1-1", 1, "b", 2000, 2100), byes), excuse: excuseDeaf},

		"a task vanishes":      {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), byes), bad: badTask},
		"never delivered":      {history: slices.Concat(turn("w0-1", 1, "a", 100, 200)[:1], byes), bad: badTask},
		"failed and not kept":  {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 200), kindExit, failed), "ran", failed), byes), bad: badTask},
		"archived for nothing": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "archived", "b"), queued("a", "archived", ""), byes), bad: badArchive},
		"skipped by itself":    {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), unrun("w1-1", 1, "a", 150, "skipped", "a"), byes), bad: badSkip},
		"marker of a failure": {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 200), kindExit, failed), "ran", failed), queued("a", "retry", "failed"),
			unrun("w1-1", 1, "b", 250, "done", "a"), byes), bad: badMarker},
		"run again within done-for": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), kindEnter, once),
			set(turn("w1-1", 1, "b", 1500, 1600), kindEnter, once), byes), bad: badTwice},
		"run again after done-for": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), kindEnter, once),
			set(turn("w1-1", 1, "b", 2300, 2400), kindEnter, once), byes)},
		"run again, marker not confirmed": {history: slices.Concat(set(set(turn("w0-1", 1, "a", 100, 200), kindEnter, once), "released", failed),
			set(turn("w1-1", 1, "b", 1500, 1600), kindEnter, once), byes)},
		"run again, marker flushed": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 200), kindEnter, once),
			set(turn("w1-1", 1, "b", 1500, 1600), kindEnter, once), fault(faultFlush, "", "", 1000, 1001), byes), excuse: excuseLoss},
		"key without TTL":   {history: slices.Concat(end(kindImmortal, "rig", 500, "TTL -1"), byes), bad: badTTL},
		"key left behind":   {history: slices.Concat(end(kindLeftover, "rig", 9500, "value"), byes), bad: badLeftover},
		"no outcome":        {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "ran"), queued("a", "active", ""), byes), bad: badBooks},
		"two outcomes":      {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), unrun("w0-1", 1, "a", 201, "done", "a")[2:], byes), bad: badBooks},
		"a lock never ends": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "released"), byes), bad: badBooks},
		"a lock ends twice": {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w0-1", 1, "a", 100, 200)[5:6], byes), bad: badBooks},
		"a lock never ends at an impatient shutdown": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), kindExit, "released", "ran"),
			end(kindBye, "w0-1", 300, "deadline exceeded"), queued("a", "pending", ""), byes[1:]), bad: badBooks},
		"a release in flight at an impatient shutdown": {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "released"),
			end(kindBye, "w0-1", 300, "deadline exceeded"), byes[1:])},
		"file lock of a deaf handler, whose process takes its time to die": {history: slices.Concat(
			set(set(without(turn("w0-1", 1, "a", 100, 200), kindExit, "ran"), kindEnter, deaf), "released", lostAt(1000)), end(kindKilled, "w0-1", 1900, ""),
			set(turn("w1-1", 1, "b", 1910, 2000), kindEnter, func(r *record) { r.Clash = true }), end(kindGone, "w0-1", 1950, ""),
			queued("a", "active", ""), byes[1:]), excuse: excuseDeaf},
		"a release that takes longer than the handler, after a loss": {history: slices.Concat(set(turn("w0-1", 1, "a", 100, 210), "released",
			func(r *record) { r.T = ms(2000) }), fault(faultLossy, "", "", 200, 201), byes)},
		"ran without a handler":       {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), kindEnter, kindExit), byes), bad: badBooks},
		"a handler without a lock":    {history: slices.Concat(without(turn("w0-1", 1, "a", 100, 200), "acquired", "released"), byes), bad: badHistory},
		"a process that died alone":   {history: slices.Concat(end(kindDied, "w0-1", 100, "panic"), byes[1:]), bad: badHistory},
		"a process without an end":    {history: slices.Concat(turn("w0-1", 1, "a", 100, 200), byes[1:]), bad: badHistory},
		"a record nobody understands": {history: slices.Concat(end("surprise", "w0-1", 100, ""), byes), bad: badHistory},
	} {
		t.Run(name, func(t *testing.T) {
			history := slices.Clone(test.history)
			slices.SortStableFunc(history, func(a, b record) int { return int(a.T - b.T) })
			f := check(history, time.Second)
			if test.bad == "" && len(f.violations) > 0 {
				t.Errorf("a good history: %v", f.violations)
			}
			if test.bad != "" && f.count(test.bad) == 0 {
				t.Errorf("violations %v, want kind %q", f.violations, test.bad)
			}
			if test.excuse != "" && f.excused[test.excuse] != 1 {
				t.Errorf("excused %v, want one %q", f.excused, test.excuse)
			}
			if test.excuse == "" && len(f.excused) > 0 {
				t.Errorf("excused %v, want nothing", f.excused)
			}
		})
	}
}

func TestCheckCounts(t *testing.T) {
	history := slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w0-1", 2, "b", 300, 400), unrun("w0-1", 3, "c", 350, "requeued", "b"),
		queued("c", "retry", ""), end(kindBye, "w0-1", 8000, ""))
	f := check(history, time.Second)
	if f.cycles != 2 || f.runs != 2 || f.enqueued != 3 || f.queue["retry"] != 1 || f.events["requeued"] != 1 || len(f.violations) > 0 {
		t.Errorf("%+v", f)
	}
}

// TestHistory writes from many goroutines and reads it back in order.
func TestHistory(t *testing.T) {
	dir := t.TempDir()
	h, err := newHistory(dir, "w0-1")
	if err != nil {
		t.Fatal(err)
	}
	const writers, each = 8, 100
	done := make(chan struct{})
	for range writers {
		go func() {
			for range each {
				h.add(record{Kind: kindSeen, Err: "ünïcode \n"})
			}
			done <- struct{}{}
		}()
	}
	for range writers {
		<-done
	}
	if err := h.close(); err != nil {
		t.Fatal(err)
	}
	all, err := readHistories(dir)
	if err != nil || len(all) != writers*each {
		t.Fatalf("%d records, %v", len(all), err)
	}
	if !slices.IsSortedFunc(all, func(a, b record) int { return int(a.T - b.T) }) {
		t.Error("not in the order of their stamps")
	}
	if h.add(record{Kind: kindSeen}); !h.failed.Load() {
		t.Error("a record that could not be written went unnoticed")
	}
}

func TestScheduleReplays(t *testing.T) {
	for _, c := range classes {
		seed := rand.Uint64()
		plan := schedule(c, seed, 8, time.Minute)
		if !slices.Equal(plan, schedule(c, seed, 8, time.Minute)) {
			t.Errorf("%s: one seed, two plans", c.name)
		}
		if c.every > 0 && len(plan) < 5 {
			t.Errorf("%s: %d faults in a minute", c.name, len(plan))
		}
		for _, s := range plan {
			if s.at+s.lasts > time.Minute {
				t.Errorf("%s: %s lasts beyond the end", c.name, s.fault)
			}
		}
	}
}

func TestManner(t *testing.T) {
	var long, deaf, fails int
	for i := range 10000 {
		m := mannerOf(1, string(rune(i)), 0.5)
		if m != mannerOf(1, string(rune(i)), 0.5) {
			t.Fatal("one task, two manners")
		}
		if m.takes >= ttl {
			long++
		}
		if m.deaf {
			deaf++
		}
		if m.fails {
			fails++
		}
	}
	if long < 200 || deaf < 100 || fails < 100 {
		t.Errorf("long %d, deaf %d, fails %d of 10000", long, deaf, fails)
	}
}
