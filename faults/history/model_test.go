package history

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	silently = "redislock: lock is lost: lock k: Redis has not confirmed it in time"
	replied  = "redislock: lock is lost: lock k: the key is gone or somebody else's"
	atLast   = "redislock: lock is lost: lock k: somebody else's at its release"
)

func TestCheckModel(t *testing.T) {
	first := func() []Record { return turn("w0-1", 1, "a", 100, 2000) }
	short := func() []Record { return turn("w0-1", 1, "a", 100, 200) }
	once := func(r *Record) { r.DoneFor = ms(2000) }
	marking := func() []Record { return set(set(short(), KindEnter, once), KindExit, once) }
	failed := func(r *Record) { r.Err = "failed" }
	lost := func(t int64, err string) func(*Record) {
		return func(r *Record) { r.Kind, r.T, r.Err = "lost", ms(t), err }
	}
	late := func(records []Record) []Record {
		return set(records, "released", func(r *Record) { r.T = ms(2600) })
	}
	met := func(t int64, outcome, holder string) []Record { return unrun("w1-1", 7, "m", t, outcome, holder) }
	taken := func(from, to int64) []Record { return turn("w1-1", 1, "b", from, to) }
	unavailable := func(task string, t int64) []Record {
		return set(unrun("w0-1", 9, task, t, "requeued", ""), "requeued", failed)
	}
	killed := func(at int64, records []Record) []Record {
		records = slices.DeleteFunc(records, func(r Record) bool { return r.T > ms(at) })
		return slices.Concat(records, end(KindKilled, "w0-1", at, ""), end(KindGone, "w0-1", at+5, ""))
	}

	for name, test := range map[string]struct {
		history []Record
		bad     bool
	}{
		"one after the other":       {history: slices.Concat(short(), taken(210, 300))},
		"two holders":               {history: slices.Concat(short(), taken(150, 250)), bad: true},
		"a healthy lock, taken":     {history: slices.Concat(first(), taken(1900, 1950)), bad: true},
		"met while it was held":     {history: slices.Concat(short(), met(150, "skipped", "a"))},
		"met while it was asked":    {history: slices.Concat(short(), met(97, "requeued", "a"), taken(210, 300))},
		"met when it was released":  {history: slices.Concat(short(), met(210, "skipped", "a")), bad: true},
		"met before it was asked":   {history: slices.Concat(short(), met(90, "requeued", "a")), bad: true},
		"met under the next holder": {history: slices.Concat(short(), taken(210, 300), met(250, "archived", "a")), bad: true},
		"met, but nobody knows it":  {history: slices.Concat(short(), met(150, "skipped", "x")), bad: true},

		"met by its own host under the next holder": {history: slices.Concat(set(first(), "released", lost(900, replied)),
			fault(FaultDelete, "", "k", 500, 501), taken(600, 700), unrun("w0-1", 9, "m", 650, "requeued", "a"))},
		"met by another host under the next holder": {history: slices.Concat(set(first(), "released", lost(900, replied)),
			fault(FaultDelete, "", "k", 500, 501), taken(600, 700), met(650, "requeued", "a")), bad: true},
		"met by its own host when it was lost": {history: slices.Concat(set(first(), "released", lost(550, replied)),
			fault(FaultDelete, "", "k", 500, 501), taken(600, 900), unrun("w0-1", 9, "m", 850, "requeued", "a")), bad: true},

		"taken after it was lost":         {history: slices.Concat(set(first(), "released", lost(1500, silently)), taken(1600, 1700))},
		"taken before it was lost":        {history: slices.Concat(set(first(), "released", lost(1500, silently)), taken(1400, 1450)), bad: true},
		"lost before the TTL was over":    {history: slices.Concat(set(first(), "released", lost(500, silently)), taken(600, 700)), bad: true},
		"met long after it was lost":      {history: slices.Concat(set(first(), "released", lost(1100, silently)), met(2400, "skipped", "a")), bad: true},
		"abandoned and taken":             {history: slices.Concat(set(first(), "released", func(r *Record) { r.Kind, r.T = "abandoned", ms(1500) }), taken(1600, 1700))},
		"told that it is gone":            {history: set(first(), "released", lost(1500, replied)), bad: true},
		"told that it is gone, flushed":   {history: slices.Concat(set(first(), "released", lost(500, replied)), fault(FaultFlush, "", "", 400, 401))},
		"told that it is another's":       {history: slices.Concat(set(short(), "released", lost(202, atLast)), taken(202, 300))},
		"released, but not confirmed":     {history: slices.Concat(set(short(), "released", failed), taken(210, 300))},
		"not confirmed, and met":          {history: slices.Concat(set(short(), "released", failed), met(900, "skipped", "a"), taken(1300, 1400))},
		"not confirmed, and met for ever": {history: slices.Concat(set(short(), "released", failed), met(2900, "skipped", "a")), bad: true},
		"released late":                   {history: slices.Concat(late(first()), taken(2050, 2080))}, // the reply was late
		"marked late, taken meanwhile":    {history: slices.Concat(late(set(first(), KindExit, once)), taken(2200, 2300), met(2700, "done", "a"))},
		"marked late, taken before": {history: slices.Concat(late(set(first(), KindExit, once)), taken(2050, 2080),
			met(2700, "done", "a")), bad: true},

		"flushed, and taken":                 {history: slices.Concat(first(), fault(FaultFlush, "", "", 500, 501), taken(510, 600))},
		"flushed after it was taken":         {history: slices.Concat(first(), fault(FaultFlush, "", "", 700, 701), taken(510, 600)), bad: true},
		"flushed before it was asked for":    {history: slices.Concat(first(), fault(FaultFlush, "", "", 50, 51), taken(510, 600)), bad: true},
		"another key deleted":                {history: slices.Concat(first(), fault(FaultDelete, "", "other", 500, 501), taken(510, 600)), bad: true},
		"stolen, and the thief met":          {history: slices.Concat(first(), fault(FaultSteal, "", "k", 500, 501), met(600, "skipped", "thief"))},
		"a thief met who stole elsewhere":    {history: slices.Concat(first(), fault(FaultSteal, "", "other", 500, 501), met(600, "skipped", "thief")), bad: true},
		"a thief met when its time is over":  {history: slices.Concat(short(), fault(FaultSteal, "", "k", 150, 151), met(2500, "skipped", "thief")), bad: true},
		"paused, and taken":                  {history: slices.Concat(first(), fault(FaultPause, "w0-1", "", 900, 2500), taken(1500, 1600))},
		"another process paused":             {history: slices.Concat(first(), fault(FaultPause, "w2-1", "", 900, 2500), taken(1500, 1600)), bad: true},
		"paused, and taken before its time":  {history: slices.Concat(first(), fault(FaultPause, "w0-1", "", 150, 2500), taken(900, 950)), bad: true},
		"stalled, and taken":                 {history: slices.Concat(first(), []Record{{T: ms(1300), Until: ms(1500), Kind: KindStall, Process: "w0-1"}}, taken(1450, 1480))},
		"stalled too briefly, and taken":     {history: slices.Concat(first(), []Record{{T: ms(1300), Until: ms(1360), Kind: KindStall, Process: "w0-1"}}, taken(1450, 1480)), bad: true},
		"cut off for less than its validity": {history: slices.Concat(first(), fault("cut", "w0", "", 500, 1500), taken(1600, 1700)), bad: true},
		"brought back by a failover":         {history: slices.Concat(short(), taken(210, 300), fault(FaultFailover, "", "", 250, 255), met(400, "skipped", "a"))},
		"brought back too late":              {history: slices.Concat(short(), taken(210, 300), fault(FaultFailover, "", "", 250, 255), met(1600, "skipped", "a")), bad: true},
		"a marker lost in a failover, then back": {history: slices.Concat(marking(), fault(FaultFailover, "", "", 250, 300), taken(260, 270),
			met(290, "done", "a"))},
		"a clock that jumped back": {history: slices.Concat(killed(150, short()), fault(FaultBackward, "", "", 500, 501), met(2200, "skipped", "a"))},

		"killed, and taken after a TTL":          {history: slices.Concat(killed(150, short()), taken(1200, 1300))},
		"killed, and taken before a TTL":         {history: slices.Concat(killed(150, short()), taken(500, 600)), bad: true},
		"killed, and met":                        {history: slices.Concat(killed(150, short()), met(1100, "skipped", "a"))},
		"killed, and met after two TTLs":         {history: slices.Concat(killed(150, short()), met(2200, "skipped", "a")), bad: true},
		"killed while it released it":            {history: slices.Concat(killed(200, short()), taken(250, 300))},
		"killed before it knew of its lock":      {history: slices.Concat(killed(98, short()), met(500, "skipped", "a"), taken(1200, 1300))},
		"killed before it could ask":             {history: slices.Concat(killed(97, short()), met(500, "skipped", "a")), bad: true},
		"a try of unknown outcome, met":          {history: slices.Concat(unavailable("a", 100), met(300, "skipped", "a"))},
		"a try of unknown outcome, met late":     {history: slices.Concat(unavailable("a", 100), met(2000, "skipped", "a")), bad: true},
		"a try of another key, met":              {history: slices.Concat(set(unavailable("a", 100), "requeued", func(r *Record) { r.Key = "other" }), met(300, "skipped", "a")), bad: true},
		"a try of unknown outcome, two tasks":    {history: slices.Concat(unavailable("a", 100), met(300, "skipped", "a"), taken(310, 400))},
		"a try of unknown outcome, under a lock": {history: slices.Concat(first(), unavailable("x", 150), met(300, "skipped", "x")), bad: true},
		"a try that hung, met late":              {history: slices.Concat(unavailable("a", 100), fault("hang", "w0", "", 50, 1500), met(2400, "skipped", "a"))},
		"a try that was delayed, met late":       {history: slices.Concat(unavailable("a", 100), fault("delay", "w0", "", 100, 100), met(1900, "skipped", "a"))},
		"met by one who waits since it was held": {history: slices.Concat(short(), set(met(3000, "skipped", "a"), KindSeen, func(r *Record) { r.T = ms(150) })), bad: true},

		"an earlier try of one who waits": {history: slices.Concat(set(short(), KindSeen, func(r *Record) { r.T = ms(10) }), fault("cut", "w0", "", 15, 15),
			met(50, "skipped", "a"))},

		"marker met":                        {history: slices.Concat(marking(), met(1000, "done", "a"))},
		"marker met that nobody left":       {history: slices.Concat(short(), met(1000, "done", "a")), bad: true},
		"marker of a failure met":           {history: slices.Concat(set(set(marking(), KindExit, failed), "ran", failed), met(1000, "done", "a")), bad: true},
		"marker met before the work ended":  {history: slices.Concat(marking(), met(150, "done", "a")), bad: true},
		"marker met after its time":         {history: slices.Concat(marking(), met(3100, "done", "a")), bad: true},
		"marker met for a lock":             {history: slices.Concat(marking(), met(1000, "skipped", "a")), bad: true},
		"lock met for a marker":             {history: slices.Concat(first(), met(1000, "done", "a")), bad: true},
		"taken while the marker stands":     {history: slices.Concat(marking(), taken(1000, 1100)), bad: true},
		"taken after the marker's time":     {history: slices.Concat(marking(), taken(2300, 2400))},
		"taken when the marker was deleted": {history: slices.Concat(marking(), fault(FaultDelete, "", "k", 500, 501), taken(1000, 1100))},
		"marker not confirmed, and met":     {history: slices.Concat(set(marking(), "released", failed), met(1000, "done", "a"))},
		"marker not confirmed, and taken":   {history: slices.Concat(set(marking(), "released", failed), taken(1000, 1100))},
		"marker not confirmed, taken, and met": {history: slices.Concat(set(marking(), "released", failed), taken(1000, 1100),
			met(1050, "done", "a")), bad: true},
		"marker left where the key was lost": {history: slices.Concat(marking(), fault(FaultFlush, "", "", 150, 151), met(1000, "done", "a"))},
		"released by hand, then done": {history: slices.Concat(set(marking(), "released", func(r *Record) { r.T = ms(150) }), taken(160, 300),
			met(250, "requeued", "b"))},
		"released by hand, yet a marker": {history: slices.Concat(set(marking(), "released", func(r *Record) { r.T = ms(150) }), met(250, "done", "a")), bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			history := slices.Clone(test.history)
			slices.SortStableFunc(history, func(a, b Record) int { return int(a.T - b.T) })
			l := CheckModel(history, terms)
			if bad := len(l.Violations) > 0; bad != test.bad || l.Unknown > 0 {
				t.Errorf("%+v, want a violation: %v", l, test.bad)
			}
		})
	}
}

// TestCheckModelInPieces wants a piece to know what the one before it left.
func TestCheckModelInPieces(t *testing.T) {
	var busy []Record
	const turns = 3 * pieceSize
	for i := range int64(turns) {
		busy = append(busy, turn("w0-1", i, fmt.Sprint("t", i), 100+10*i, 105+10*i)...)
	}
	last := func() []Record { return turn("w0-1", 999, "last", 1000, 3000) }
	var meet []Record
	for i := range int64(2*pieceSize - 1) { // so that a piece begins after it
		meet = append(meet, unrun("w1-1", i, fmt.Sprint("m", i), 1100+10*i, "skipped", "last")...)
	}
	for name, test := range map[string]struct {
		history []Record
		want    int
	}{
		"good":               {slices.Concat(busy, last(), meet), 0},
		"a lock held before": {slices.Concat(busy, last(), meet, turn("w2-1", 1, "b", 2500, 2600)), 1},
		"a marker left before": {slices.Concat(busy, set(turn("w0-1", 998, "once", 800, 810), KindExit, func(r *Record) { r.DoneFor = ms(2000) }),
			last(), meet), 1},
		"nothing left before": {slices.Concat(busy, last(), meet, unrun("w1-1", 999, "m", 1600, "skipped", "t1")), 1},
	} {
		t.Run(name, func(t *testing.T) {
			slices.SortStableFunc(test.history, func(a, b Record) int { return int(a.T - b.T) })
			l := CheckModel(test.history, terms)
			if len(l.Violations) != test.want || l.Pieces < 5 || l.Largest > 2*pieceSize || l.Operations < 2*turns {
				t.Errorf("%+v, want %d violations", l, test.want)
			}
		})
	}
}

// TestViolationOfModel looks at what a person gets to see.
func TestViolationOfModel(t *testing.T) {
	l := CheckModel(slices.Concat(turn("w0-1", 1, "a", 100, 200), turn("w1-1", 2, "b", 150, 250)), terms)
	if len(l.Violations) != 1 || l.Violations[0].Kind != BadOrder {
		t.Fatalf("%+v", l)
	}
	for _, part := range []string{"k: ", "a of w0-1/1 acquires it", "holds {lock of a of w0-1/1}", "b of w1-1/2 acquires it (148000000–149000000)"} {
		if !strings.Contains(l.Violations[0].Text, part) {
			t.Errorf("%q does not say %q", l.Violations[0].Text, part)
		}
	}
	dir := t.TempDir()
	if err := l.Draw(dir); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(dir, "not-linearizable-1.html"))
	if err != nil || !strings.Contains(string(page), "b of w1-1/2 acquires it") {
		t.Errorf("%d bytes, %v", len(page), err)
	}
}

// crowded is a history as long as a campaign's, with a crowd at every lock.
func crowded() (history []Record) {
	const cycles, crowd = 10000, 4
	for i := range int64(cycles) {
		holder := fmt.Sprint("t", i)
		history = append(history, turn("w0-1", i, holder, 100+10*i, 106+10*i)...)
		for j := range int64(crowd) {
			history = append(history, unrun("w1-1", i*crowd+j, "m", 101+10*i+j, "requeued", holder)...)
		}
	}
	slices.SortStableFunc(history, func(a, b Record) int { return int(a.T - b.T) })
	return history
}

func TestCheckModelOfManyCycles(t *testing.T) {
	if l := CheckModel(crowded(), terms); len(l.Violations) > 0 || l.Unknown > 0 || l.Operations < 60000 || l.Largest > 2*pieceSize {
		t.Errorf("%d violations, %d operations, %d pieces, the largest of %d, %d unknown", len(l.Violations), l.Operations, l.Pieces, l.Largest, l.Unknown)
	}
}

// BenchmarkCheckModel is what a campaign of 10,000 lock cycles of one key costs.
func BenchmarkCheckModel(b *testing.B) {
	history := crowded()
	for b.Loop() {
		CheckModel(history, terms)
	}
}
