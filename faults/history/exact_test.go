package history

import (
	"slices"
	"testing"
	"time"

	"example.com/redislock"
)

// exactly is turn with what only a simulation knows: the deadline and the grace period, and when Redis set the lock's TTL.
func exactly(process string, n int64, task string, from, to int64) []Record {
	records := set(turn(process, n, task, from, to), KindSeen, func(r *Record) { r.Until, r.Grace = ms(60000), ms(2000) })
	for t := from - 1; t <= to; t += 333 {
		records = append(records, Record{T: ms(t), Kind: KindSet, Process: process, Delivery: n, Task: task, Key: "k"})
	}
	return records
}

// TestCheckExact is about what is checked in virtual time only.
func TestCheckExact(t *testing.T) {
	exact := Terms{TTL: time.Second, Slack: 5 * time.Millisecond, Exact: true}
	byes := slices.Concat(end(KindBye, "w0-1", 8000, ""), end(KindBye, "w1-1", 8000, ""))
	at := func(t int64) func(*Record) { return func(r *Record) { r.T = ms(t) } }
	become := func(kind string, t int64) func(*Record) { return func(r *Record) { r.Kind, r.T = kind, ms(t) } }
	inside := set(without(exactly("w0-1", 2, "a", 200, 300), "ran", KindEnqueued), KindSeen, func(r *Record) { r.Kind = KindTry })
	for i := range inside {
		inside[i].Key = "another"
	}
	abandoned := func(t int64) []Record {
		records := set(exactly("w0-1", 1, "a", 100, 4000), "released", become("abandoned", t))
		return slices.DeleteFunc(records, func(r Record) bool { return r.Kind == KindSet && r.T > ms(t) })
	}
	taken := func(t int64) []Record {
		return []Record{{T: ms(t), Kind: KindTaken, Process: "w0-1", Delivery: 1, Task: "a"}}
	}
	deaf := func(r *Record) { r.Deaf = true }
	failed := func(r *Record) { r.Err = "failed" }
	once := func(r *Record) { r.DoneFor = ms(2000) }
	again := func(retried int) []Record {
		return set(without(exactly("w1-1", 9, "a", 500, 600), KindEnqueued), KindSeen, func(r *Record) { r.Retried = retried })
	}
	unlocked := func(r *Record) { r.Unlocked = true }
	open := func(from, to int64) []Record {
		return set(set(without(exactly("w0-1", 1, "a", from, to), "acquired", "released", KindSet), KindEnter, unlocked), "ran", unlocked)
	}
	last := func(t, deadline int64, holder string) []Record {
		return slices.Concat(set(unrun("w0-1", 1, "a", t, "archived", holder), KindSeen, func(r *Record) { r.T, r.Until = ms(10), ms(deadline) }),
			queued("a", "archived", "held"))
	}
	for name, test := range map[string]struct {
		history []Record
		bad     string // kind of violation, empty: none
		excuse  string
	}{
		"long work":                     {history: slices.Concat(exactly("w0-1", 1, "a", 100, 5000), byes)},
		"a lock inside, by Do":          {history: slices.Concat(exactly("w0-1", 1, "a", 100, 900), inside, byes)},
		"not confirmed for long":        {history: slices.Concat(without(exactly("w0-1", 1, "a", 100, 1200), KindSet), exactly("w0-1", 1, "a", 100, 1200)[7:8], byes), bad: BadNotice},
		"not confirmed, after its work": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 200), "released", at(1900)), byes)},
		"never confirmed":               {history: slices.Concat(without(exactly("w0-1", 1, "a", 100, 200), KindSet), byes), bad: BadModel},
		"what no lock may do":           {history: slices.Concat([]Record{{T: 1, Kind: KindModel, Key: "k"}}, byes), bad: BadModel},
		"extended after its end": {history: slices.Concat(exactly("w0-1", 1, "a", 100, 200),
			[]Record{{T: ms(1300), Kind: KindSet, Process: "w0-1", Delivery: 1, Task: "a", Key: "k"}}, byes), bad: BadLeftover},

		"lost for nothing": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 500), "released", become("lost", 400)), byes), bad: BadLoss},
		"lost in a cut": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 500), "released", become("lost", 400)), fault("cut", "w0", "", 200, 500),
			byes)},
		"lost while asynq is cut off": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 500), "released", become("lost", 400)),
			fault(FaultQueue+"cut", "w0", "", 200, 500), byes), bad: BadLoss},
		"deleted": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 500), "released", become("lost", 400)), fault(FaultDelete, "", "k", 200, 200), byes)},

		"abandoned after its grace period": {history: slices.Concat(abandoned(2500), taken(500), byes)},
		"abandoned too early":              {history: slices.Concat(abandoned(2400), taken(500), byes), bad: BadGrace},
		"abandoned for nothing":            {history: slices.Concat(abandoned(2400), byes), bad: BadGrace},
		"kept too long":                    {history: slices.Concat(exactly("w0-1", 1, "a", 100, 4000), taken(500), byes), bad: BadGrace},
		"abandoned by an impatient shutdown": {history: slices.Concat(abandoned(1000),
			end(KindBye, "w0-1", 1000, "handlers still run"), byes[1:])},
		"a lock that outlives shutdown": {history: slices.Concat(exactly("w0-1", 1, "a", 100, 4000), end(KindBye, "w0-1", 1000, "handlers still run"),
			byes[1:]), bad: BadBooks},
		"acquired after shutdown": {history: slices.Concat(exactly("w0-1", 1, "a", 100, 200), end(KindBye, "w0-1", 90, ""), byes[1:]), bad: BadBooks},
		"an outcome after shutdown": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 200), "ran", at(300)), end(KindBye, "w0-1", 250, ""),
			byes[1:]), bad: BadBooks},
		"never over": {history: slices.Concat(without(exactly("w0-1", 1, "a", 100, 200), "ran"), end(KindBye, "w0-1", 250, "handlers still run"),
			queued("a", "active", ""), byes[1:]), bad: BadBooks},
		"began when asynq had taken it back": {history: slices.Concat(exactly("w0-1", 1, "a", 100, 200), taken(90), byes), bad: BadStart},

		"archived by its policy": {history: slices.Concat(set(last(50, 60000, "b"), KindSeen, func(r *Record) { r.Archives = true }), byes)},
		"archived by its policy for its own run": {history: slices.Concat(set(last(50, 60000, "a"), KindSeen, func(r *Record) { r.Archives = true }),
			byes), bad: BadArchive},
		"archived at its deadline":          {history: slices.Concat(last(9001, 10000, "b"), byes)},
		"archived long before":              {history: slices.Concat(last(8000, 10000, "b"), byes), bad: BadArchive},
		"put back, and archived by asynq":   {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), queued("a", "archived", "lease expired"), byes)},
		"skipped for a holder":              {history: slices.Concat(exactly("w1-1", 1, "b", 10, 100), unrun("w0-1", 1, "a", 50, "skipped", "b"), byes)},
		"refused because of its own run":    {history: slices.Concat(unrun("w0-1", 1, "a", 50, "refused", "a"), queued("a", "retry", ""), byes), bad: BadSkip},
		"succeeded, and told as a failure":  {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 200), "ran", failed), queued("a", "retry", "failed"), byes), bad: BadBooks},
		"release not confirmed in a cut":    {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 200), "released", failed), fault("cut", "w0", "", 150, 300), byes)},
		"release not confirmed for nothing": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 200), "released", failed), byes), bad: BadLoss},
		"refused for want of Redis": {history: slices.Concat(set(unrun("w0-1", 1, "a", 50, "refused", ""), "refused", func(r *Record) { r.Err = redislock.ErrUnavailable.Error() }),
			queued("a", "retry", ""), byes), bad: BadBooks},
		"held up by itself later":          {history: slices.Concat(exactly("w0-1", 1, "a", 10, 100), unrun("w1-1", 1, "a", 50, "requeued", "a"), byes)},
		"put back, which counted":          {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), again(1), byes), bad: BadBooks},
		"put back, which did not count":    {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), again(0), byes)},
		"put back, with the queue cut off": {history: slices.Concat(unrun("w0-1", 1, "a", 50, "requeued", "b"), again(1), fault(FaultQueue+"cut", "w0", "", 40, 60), byes)},
		"put back by a marker": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 200), KindEnter, once), unrun("w1-1", 1, "b", 300, "requeued", "a"),
			queued("b", "retry", ""), byes), bad: BadMarker},
		"put back by a marker's last moment": {history: slices.Concat(set(exactly("w0-1", 1, "a", 100, 200), KindEnter, once), unrun("w1-1", 1, "b", 2199, "requeued", "a"),
			queued("b", "retry", ""), byes)},
		"deaf, and its key freed too early": {history: slices.Concat(set(abandoned(1000), KindEnter, deaf), end(KindBye, "w0-1", 1000, "handlers still run"),
			exactly("w1-1", 1, "b", 1100, 1200), byes[1:]), bad: BadOverlap},
		"deaf, and its key lapsed": {history: slices.Concat(set(abandoned(1000), KindEnter, deaf), end(KindBye, "w0-1", 1000, "handlers still run"),
			exactly("w1-1", 1, "b", 1900, 2000), byes[1:]), excuse: ExcuseDeaf},
		"unlocked in a cut":                {history: slices.Concat(open(100, 200), exactly("w1-1", 1, "b", 150, 250), fault("cut", "w0", "", 50, 300), byes), excuse: ExcuseOpen},
		"unlocked for nothing":             {history: slices.Concat(open(100, 200), byes), bad: BadLoss},
		"unlocked, which nobody says":      {history: slices.Concat(set(open(100, 200), "ran", func(r *Record) { r.Unlocked = false }), fault("cut", "w0", "", 50, 300), byes), bad: BadBooks},
		"skipped with an error of its own": {history: slices.Concat(exactly("w1-1", 1, "b", 10, 100), set(unrun("w0-1", 1, "a", 50, "skipped", "b"), "skipped", func(r *Record) { r.Err = "revoked" }), byes)},
	} {
		t.Run(name, func(t *testing.T) {
			verdict(t, test.history, exact, test.bad, test.excuse)
		})
	}
}
