package sim

import (
	"flag"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/redislock/faults/history"
	"example.com/redislock/internal/virtual"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

var (
	firstSeed  = flag.Uint64("sim.seed", 1, "seed of the first world")
	worlds     = flag.Int("sim.worlds", 0, "how many worlds, with one seed after the other; 0: as many as the tests usually play")
	playFor    = flag.Duration("sim.for", 0, "real time in which to begin further worlds, instead of a number of worlds")
	wholeStory = flag.Bool("sim.history", false, "print the whole history of a world that fails, not only what has to do with it")
)

const (
	usualWorlds = 100
	shortWorlds = 4
)

// slow says that this is built with the race detector.
var slow bool

func TestMain(m *testing.M) {
	redis.SetLogger(virtual.Quiet{})
	debug.SetGCPercent(400) // a Lua state for each script is much garbage and little memory
	goleak.VerifyTestMain(m)
}

// sums are what all worlds come to.
type sums struct {
	mu       sync.Mutex
	worlds   int
	lasted   time.Duration
	cycles   int
	runs     int
	tasks    int
	longest  time.Duration
	ttls     map[string]int
	events   map[string]int
	faults   map[string]int
	excused  map[string]int
	outcomes map[string]int
}

func newSums() *sums {
	return &sums{ttls: map[string]int{}, events: map[string]int{}, faults: map[string]int{}, excused: map[string]int{}, outcomes: map[string]int{}}
}

func (s *sums) add(r Result) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.worlds++
	s.lasted += r.Lasted
	s.cycles += r.Cycles
	s.runs += r.Runs
	s.tasks += r.Enqueued
	s.longest = max(s.longest, r.Longest)
	s.ttls[r.TTL.String()]++
	for sum, part := range map[*map[string]int]map[string]int{&s.events: r.Events, &s.faults: r.Faults, &s.excused: r.Excused, &s.outcomes: r.Outcomes} {
		for k, n := range part {
			(*sum)[k] += n
		}
	}
}

func (s *sums) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d worlds, %.0f virtual hours: %d lock cycles, %d runs of handlers, %d tasks\n", s.worlds, s.lasted.Hours(), s.cycles, s.runs, s.tasks)
	for _, part := range []struct {
		name string
		sums map[string]int
	}{{"TTLs", s.ttls}, {"events", s.events}, {"faults", s.faults}, {"excused overlaps and second runs", s.excused}, {"outcomes by kind of task", s.outcomes}} {
		fmt.Fprintf(&b, "%s:\n", part.name)
		for _, k := range slices.Sorted(maps.Keys(part.sums)) {
			fmt.Fprintf(&b, "  %-45s %8d\n", k, part.sums[k])
		}
	}
	fmt.Fprintf(&b, "longest excused overlap: %v\n", s.longest)
	return b.String()
}

// TestWorlds plays random worlds, several at a time, and wants every promise kept in each.
func TestWorlds(t *testing.T) {
	began, all := time.Now(), newSums()
	n := *worlds
	if n == 0 {
		n = usualWorlds
		if slow || testing.Short() {
			n = shortWorlds
		}
	}
	seed := *firstSeed
	play := func(n int) {
		t.Run("seed", func(t *testing.T) { // returns when its worlds are over
			for range n {
				playing := seed
				t.Run(fmt.Sprint(playing), func(t *testing.T) {
					t.Parallel()
					started := time.Now()
					result := Play(t, playing)
					t.Logf("%v of locks of %v, in %v", result.Lasted, result.TTL, time.Since(started))
					all.add(result)
					report(t, playing, result)
				})
				seed++
			}
		})
	}
	if *playFor == 0 {
		play(n)
	}
	for time.Since(began) < *playFor {
		play(4 * runtime.GOMAXPROCS(0))
	}
	took := time.Since(began)
	t.Logf("%vlock cycles a minute: %.0f, virtual hours a minute: %.0f, in %v", all, float64(all.cycles)/took.Minutes(),
		all.lasted.Hours()/took.Minutes(), took.Round(time.Second))
	if all.worlds >= usualWorlds && !t.Failed() {
		all.checkReach(t)
	}
}

// report prints what is wrong with a world, what led to it, and how to see it again.
func report(t *testing.T, seed uint64, r Result) {
	if len(r.Violations) == 0 && !t.Failed() {
		return
	}
	t.Errorf("again: go test ./sim -run TestWorlds -sim.seed %d -sim.worlds 1 (TTL %v, kinds %v, %v)", seed, r.TTL, r.Kinds, r.Lasted)
	for _, v := range r.Violations {
		t.Errorf("%s: %s", v.Kind, v.Text)
	}
	const most = 150
	shown := 0
	for _, record := range r.History {
		if !*wholeStory && (shown >= most || !concerns(record, r.Violations)) {
			continue
		}
		shown++
		t.Logf("%15.6fs %s", time.Duration(record.T).Seconds(), line(record))
	}
}

// concerns reports whether a violation speaks of the record's task.
func concerns(r history.Record, violations []history.Violation) bool {
	return slices.ContainsFunc(violations[:min(len(violations), 3)], func(v history.Violation) bool {
		return r.Task != "" && r.Kind != history.KindEnqueued && strings.Contains(v.Text, r.Task) || r.Kind == history.KindFault && r.Key != "" && strings.Contains(v.Text, r.Key)
	})
}

func line(r history.Record) string {
	text := fmt.Sprintf("%-9s %s/%d %s", r.Kind, r.Process, r.Delivery, r.Task)
	if r.Key != "" {
		text += " at " + r.Key
	}
	if r.Holder != "" && r.Holder != r.Task {
		text += " of " + r.Holder
	}
	if r.Fault != "" {
		text += " " + r.Fault
	}
	if r.Until != 0 {
		text += fmt.Sprintf(" until %.6fs", time.Duration(r.Until).Seconds())
	}
	for name, is := range map[string]bool{" deaf": r.Deaf, " unlocked": r.Unlocked} {
		if is {
			text += name
		}
	}
	if r.State != "" {
		text += " " + r.State
	}
	if r.Err != "" {
		text += ": " + r.Err
	}
	return text
}

// checkReach wants the worlds to have met everything that can happen.
func (s *sums) checkReach(t *testing.T) {
	want := func(what string, sums map[string]int, names ...string) {
		for _, name := range names {
			if sums[name] == 0 {
				t.Errorf("no %s %q in %d worlds", what, name, s.worlds)
			}
		}
	}
	want("event", s.events, "ran", "skipped", "done", "requeued", "archived", "refused", "passed", "acquired", "released", "lost", "abandoned")
	for _, troubles := range [][]trouble{lockTroubles, queueTroubles, serverTroubles, dataTroubles} {
		for _, trouble := range troubles {
			want("fault", s.faults, trouble.name)
		}
	}
	want("excuse", s.excused, history.ExcuseLoss, history.ExcuseDeaf, history.ExcuseOpen)
	for _, ttl := range ttls {
		want("TTL", s.ttls, ttl.String())
	}
	for _, k := range append([]kind{periodic}, kinds...) {
		want("outcome", s.outcomes, k.name+" ran", k.name+" requeued")
		if k.doneFor > 0 {
			want("outcome", s.outcomes, k.name+" done")
		}
	}
	want("outcome", s.outcomes, "skip skipped", "drop skipped", "archive archived", "decide skipped", "decide requeued", "decide archived",
		"decide refused", "nested passed", "free passed", "json refused")
}
