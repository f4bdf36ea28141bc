package main

import (
	"bytes"
	"embed"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"text/template"
	"time"
)

// results is all that was measured. Its exported methods are for the page.
type results struct {
	Machine           machine
	pairs             map[int]map[string]samples           // µs per pair, by goroutines
	tasks             map[time.Duration]map[string]samples // tasks/s, by the time a handler takes
	allocs, bytes     map[string]samples                   // per pair
	commands, process map[string]samples                   // µs of the server per pair
	skips             []skipRow
	handOver          handOver
	held              []heldRow
	holdings          []holding
	native            []nativeRow
}

// machine is what was measured on, and with what.
type machine struct {
	CPU, OS, Go, Server, Date string
	Cores, Rounds             int
	Modules                   []string // with their versions
}

func describeMachine(env *environment) machine {
	m := machine{
		CPU: "unknown processor", OS: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version(), Server: env.s.version,
		Date: time.Now().Format(time.DateOnly), Cores: runtime.NumCPU(), Rounds: env.rounds,
	}
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			m.CPU = strings.TrimLeft(strings.TrimSpace(name), ": \t")
			break
		}
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, d := range build.Deps {
			switch d.Path {
			case "github.com/redis/go-redis/v9", "github.com/hibiken/asynq", "github.com/bsm/redislock", "github.com/go-redsync/redsync/v4", "github.com/redis/rueidis":
				m.Modules = append(m.Modules, strings.TrimPrefix(d.Path, "github.com/")+" "+d.Version)
			}
		}
	}
	return m
}

// table is printed while the measurements go on, and written to the page.
type table struct {
	title string
	head  []string
	rows  [][]string
}

func (t table) print(w io.Writer) {
	fmt.Fprintf(w, "\n%s\n", t.title)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{t.head}, t.rows...) {
		fmt.Fprintln(tw, strings.ReplaceAll(strings.Join(row, "\t"), "**", ""))
	}
	_ = tw.Flush()
}

// String is the table in Markdown.
func (t table) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(t.head, " | "), strings.Repeat("---|", len(t.head)))
	for _, row := range t.rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
	}
	return b.String()
}

// Pairs is the cost of a pair over the number of goroutines.
func (r *results) Pairs() table {
	t := table{title: "acquire + release: µs per pair (× the bare pair ± spread)", head: []string{"goroutines"}}
	for _, g := range concurrency {
		t.head = append(t.head, strconv.Itoa(g))
	}
	for _, name := range slices.Concat(plain, piped) {
		row := []string{name}
		for _, g := range concurrency {
			row = append(row, num(r.Micros(name, g))+" ("+ratio(r.pairs[g][name].over(r.pairs[g][bare]))+")")
		}
		t.rows = append(t.rows, row)
	}
	return t
}

// Tasks is the throughput of an asynq server.
func (r *results) Tasks() table {
	t := table{title: "asynq server: tasks/s (× no lock, × the bare pair ± spread)", head: []string{"lock"}}
	for _, busy := range handlerTimes {
		t.head = append(t.head, handlers(busy), "× no lock", "× bare pair")
	}
	for _, name := range locksOfTasks {
		row := []string{name}
		for _, busy := range handlerTimes {
			of := r.tasks[busy]
			row = append(row, num(of[name].median()), ratio(of[name].over(of[noLock])), ratio(of[name].over(of[bare])))
		}
		t.rows = append(t.rows, row)
	}
	return t
}

// handlers names the handlers that take so long.
func handlers(busy time.Duration) string {
	if busy == 0 {
		return "handlers that do nothing"
	}
	return "handlers that take " + duration(busy)
}

// duration is for whole seconds and milliseconds.
func duration(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.0f s", d.Seconds())
}

// Allocations is what a pair allocates.
func (r *results) Allocations() table {
	t := table{title: "allocations per pair", head: []string{"lock", "allocations", "more than the bare pair", "bytes", "more than the bare pair"}}
	for _, name := range plain {
		t.rows = append(t.rows, []string{
			name, num(r.allocs[name].median()), num(r.allocs[name].minus(r.allocs[bare]).median()),
			num(r.bytes[name].median()), num(r.bytes[name].minus(r.bytes[bare]).median()),
		})
	}
	return t
}

// Server is the processor time of the server per pair.
func (r *results) Server() table {
	t := table{title: "the server's processor time: µs per pair (± spread)", head: []string{"lock", "in commands", "× bare pair", "in all", "× bare pair"}}
	for _, name := range plain {
		t.rows = append(t.rows, []string{
			name, num(r.commands[name].median()), ratio(r.commands[name].over(r.commands[bare])),
			num(r.process[name].median()), ratio(r.process[name].over(r.process[bare])),
		})
	}
	return t
}

// Trips is the round trips of what is no plain run.
func (r *results) Trips() table {
	t := table{title: "round trips to Redis", head: []string{"what", "round trips"}}
	for _, row := range r.skips {
		t.rows = append(t.rows, []string{row.what, number(row.trips)})
	}
	return t
}

// HandOvers is how late a waiting task starts.
func (r *results) HandOvers() table {
	t := table{title: "hand-over to a task that waits: ms from the release to the start", head: []string{"holder", "had waited", "median", "slowest", "median, part of the wait"}}
	t.rows = append(t.rows, []string{"in the same process", "50 to 100 ms", num(1e3 * r.handOver.local.median()), num(1e3 * r.handOver.local.quantile(1)), ""})
	for _, row := range r.handOver.remote {
		t.rows = append(t.rows, []string{
			"in another process", number(1e3*row.waited) + " ms", num(1e3 * row.late.median()), num(1e3 * row.late.quantile(1)), percent(row.late.median() / row.waited),
		})
	}
	return t
}

// Held is what it costs to hold many locks.
func (r *results) Held() table {
	t := table{title: "locks held at once (± spread)", head: []string{"lock", "held", "TTL", "bytes each", "goroutines each", "client, % of a core", "server, % of a core", "lost"}}
	for _, row := range r.held {
		cells := []string{row.side, num(float64(row.locks)), r.HeldTTL(row.locks)}
		if len(row.cpu) == 0 {
			cells = append(cells, "failed", "", "", "", "")
		} else {
			cells = append(cells, num(row.heap.median()), num(row.goroutines.median()), num(100*row.cpu.median())+plusMinus(row.cpu),
				num(100*row.server.median())+plusMinus(row.server), strconv.Itoa(row.lost))
		}
		t.rows = append(t.rows, cells)
	}
	return t
}

// HeldTTL is the TTL of so many locks.
func (r *results) HeldTTL(locks int) string {
	for _, h := range r.holdings {
		if h.locks == locks {
			return duration(h.ttl)
		}
	}
	return ""
}

// Native is what the servers' own forms cost beside the scripts.
func (r *results) Native() table {
	t := table{title: "native forms: µs per call (± spread)", head: []string{"server", "verb", "form", "as the client sees it", "server"}}
	for _, row := range r.native {
		t.rows = append(t.rows, []string{
			row.server, row.verb, row.form, num(row.micros.median()) + plusMinus(row.micros), num(row.cpu.median()) + plusMinus(row.cpu),
		})
	}
	return t
}

// target is a promise and what came of it.
type target struct {
	work, aim, value string
	of               samples // whose spread is told
	met              bool
}

// Targets is what the project wants to be, and is.
func (r *results) Targets() table {
	t := table{title: "targets", head: []string{"work", "target", "measured", "spread", "met"}}
	for _, x := range r.targets() {
		met := "**no**"
		if x.met {
			met = "yes"
		}
		t.rows = append(t.rows, []string{x.work, x.aim, x.value, strings.TrimPrefix(plusMinus(x.of), " "), met})
	}
	return t
}

func (r *results) targets() []target {
	alone, crowd := r.pairs[1], r.pairs[64]
	noOp, busy := r.tasks[handlerTimes[0]], r.tasks[handlerTimes[1]]
	t := []target{
		atMost("acquire + release, 1 goroutine", alone[ours].over(alone[bare]), 1.05, "× the bare pair"),
		ahead("acquire + release, 1 goroutine", "faster than every peer", alone, false),
		atMost("acquire + release, 64 goroutines", crowd[ours].over(crowd[bare]), 1.10, "× the bare pair"),
		atMost("the same, auto-pipelined", crowd[oursPiped].over(crowd[bare]), 0.35, "× the bare pair, not pipelined"),
		atMost("the same, auto-pipelined", crowd[oursPiped].over(crowd[rueidisL]), 1, "× rueidislock"),
		atLeast("tasks/s, handlers that do nothing", noOp[ours].over(noOp[bare]), 0.97, "× the bare pair's"),
		ahead("tasks/s, handlers that do nothing", "ahead of every peer", noOp, true),
		atLeast("tasks/s, handlers that take 5 ms", busy[ours].over(busy[noLock]), 0.97, "× that without a lock"),
	}
	for _, row := range r.skips {
		switch {
		case !strings.HasPrefix(row.what, "duplicate"):
		case strings.HasSuffix(row.what, "this process"):
			t = append(t, atMost(row.what, samples{row.trips}, 0, "round trips"))
		default:
			t = append(t, atMost(row.what, samples{row.trips}, 1, "round trip"))
		}
	}
	t = append(t, r.heldTargets()...)
	t = append(t, atMost("hand-over in one process", r.handOver.local.times(1e3), 1, "ms"))
	for _, row := range r.handOver.remote {
		t = append(t, atMost(fmt.Sprintf("hand-over across processes after %s s", number(row.waited)), row.late.times(1/row.waited), 0.1, "of the time waited"))
	}
	return append(t,
		atMost("allocations per acquire + release", r.allocs[ours].minus(r.allocs[bare]), 12, "more than the bare pair"),
		atMost("bytes per acquire + release", r.bytes[ours].minus(r.bytes[bare]), 1536, "more than the bare pair"),
		atMost("processor time of the server in commands", r.commands[ours].over(r.commands[bare]), 1.1, "× the bare pair's"),
	)
}

// heldTargets is about 10,000 locks, or as many as were held.
func (r *results) heldTargets() []target {
	locks := r.TargetLocks()
	work := "holding " + num(float64(locks)) + " locks"
	us := r.heldBy(ours, locks)
	cpu := make(map[string]samples)
	for _, row := range r.held {
		if row.locks == locks {
			cpu[row.side] = row.cpu
		}
	}
	return []target{
		atMost(work, us.heap, 1024, "bytes each"),
		atMost(work, us.goroutines, 0.01, "goroutines each"),
		atMost(work, samples{float64(us.lost)}, 0, "lost"),
		ahead(work, "less processor time than every peer", cpu, false),
	}
}

func atMost(work string, s samples, limit float64, unit string) target {
	return target{work, "at most " + number(limit) + " " + unit, exact(s.median()), s, s.median() <= limit}
}

func atLeast(work string, s samples, limit float64, unit string) target {
	return target{work, "at least " + number(limit) + " " + unit, exact(s.median()), s, s.median() >= limit}
}

// rivals are the peers in all their forms.
var rivals = append([]string{redsyncAlive}, peers...)

// ahead compares with the peer that comes closest.
func ahead(work, aim string, of map[string]samples, more bool) target {
	t := target{work: work, aim: aim, value: "no peer could"}
	worst := math.Inf(-1)
	for _, name := range slices.Sorted(maps.Keys(of)) {
		if !slices.Contains(rivals, name) || len(of[name]) == 0 {
			continue
		}
		s := of[ours].over(of[name])
		behind := s.median()
		if more {
			behind = 1 / behind
		}
		if behind > worst {
			worst, t.of, t.value = behind, s, exact(s.median())+" × "+name
		}
	}
	t.met = worst < 1
	return t
}

// Micros is the cost of a pair.
func (r *results) Micros(side string, goroutines int) float64 {
	return r.pairs[goroutines][side].median()
}

// MicrosRatio compares two costs of a pair, round by round.
func (r *results) MicrosRatio(side, base string, goroutines int) float64 {
	return r.pairs[goroutines][side].over(r.pairs[goroutines][base]).median()
}

// Rate is the throughput with handlers of so many milliseconds.
func (r *results) Rate(side string, ms int) float64 {
	return r.tasks[time.Duration(ms)*time.Millisecond][side].median()
}

// RateRatio compares two throughputs, round by round.
func (r *results) RateRatio(side, base string, ms int) float64 {
	of := r.tasks[time.Duration(ms)*time.Millisecond]
	return of[side].over(of[base]).median()
}

// PipedTasks is how an AutoPipeliner changes the throughput under a lock, where it does least good.
func (r *results) PipedTasks() float64 {
	least := math.Inf(1)
	for _, of := range r.tasks {
		least = min(least, of[oursPiped].over(of[ours]).median())
	}
	return least
}

// ServerMicros is the processor time of the server per pair, in all.
func (r *results) ServerMicros(side string) float64 { return r.process[side].median() }

// CommandsRatio compares two sides' time in the server's commands, round by round.
func (r *results) CommandsRatio(side, base string) float64 {
	return r.commands[side].over(r.commands[base]).median()
}

// TargetLocks is the number of held locks that there is a target for, or the next smaller that was measured.
func (r *results) TargetLocks() int {
	most := 0
	for _, row := range r.held {
		if row.locks <= 10_000 {
			most = max(most, row.locks)
		}
	}
	return most
}

// MostLocks is how many locks redislock held without a loss.
func (r *results) MostLocks() int {
	most := 0
	for _, row := range r.held {
		if row.side == ours && len(row.cpu) > 0 && row.lost == 0 {
			most = max(most, row.locks)
		}
	}
	return most
}

func (r *results) heldBy(side string, locks int) heldRow {
	for _, row := range r.held {
		if row.side == side && row.locks == locks {
			return row
		}
	}
	return heldRow{}
}

// HeldBytes, HeldCPU and HeldServer are what redislock needs to hold so many locks: bytes of each, parts of a core.
func (r *results) HeldBytes(locks int) float64  { return r.heldBy(ours, locks).heap.median() }
func (r *results) HeldCPU(locks int) float64    { return r.heldBy(ours, locks).cpu.median() }
func (r *results) HeldServer(locks int) float64 { return r.heldBy(ours, locks).server.median() }

// LocalMillis is the hand-over in one process.
func (r *results) LocalMillis() float64 { return 1e3 * r.handOver.local.median() }

// Peers are the other packages.
func (r *results) Peers() []string { return peers }

//go:embed performance.tmpl profiles.tmpl
var pages embed.FS

var page = template.Must(template.New("performance.tmpl").Funcs(template.FuncMap{
	"num": num, "exact": exact, "percent": percent,
	"count":     func(n int) string { return num(float64(n)) },
	"join":      strings.Join,
	"perSecond": func(micros float64) float64 { return math.Round(1e4/micros) * 100 },
	// by picks a word: the first if a ratio is below the one limit, the last if above the other.
	"by": func(v, low, high float64, below, between, above string) string {
		switch {
		case v < low:
			return below
		case v > high:
			return above
		}
		return between
	},
}).ParseFS(pages, "*.tmpl"))

// plots are the pictures of the page, by the end of their name.
func (r *results) plots() map[string][]byte {
	over := plot{title: "acquire + release", x: "goroutines", y: "µs per pair", logY: true}
	for _, name := range slices.Concat(plain, piped) {
		l := line{name: name}
		for _, g := range concurrency {
			l.x, l.y = append(l.x, float64(g)), append(l.y, r.Micros(name, g))
		}
		over.lines = append(over.lines, l)
	}
	groups := make([]string, len(handlerTimes))
	for i, busy := range handlerTimes {
		groups[i] = handlers(busy)
	}
	return map[string][]byte{
		"pairs": chart(over),
		"tasks": bars("tasks/s of an asynq server", groups, locksOfTasks, func(g int, name string) float64 { return r.tasks[handlerTimes[g]][name].median() }),
		"heap":  chart(r.heldPlot("memory of held locks", "bytes each", func(row heldRow) float64 { return row.heap.median() })),
		"cpu":   chart(r.heldPlot("processor time of held locks, client", "% of a core", func(row heldRow) float64 { return 100 * row.cpu.median() })),
	}
}

func (r *results) heldPlot(title, y string, value func(heldRow) float64) plot {
	p := plot{title: title, x: "locks held", y: y, logY: true}
	for _, row := range r.held {
		if len(row.cpu) == 0 {
			continue
		}
		i := slices.IndexFunc(p.lines, func(l line) bool { return l.name == row.side })
		if i < 0 {
			i, p.lines = len(p.lines), append(p.lines, line{name: row.side})
		}
		l := &p.lines[i]
		l.x, l.y = append(l.x, float64(row.locks)), append(l.y, value(row))
	}
	return p
}

// write writes the page, and its plots beside it.
func (r *results) write(path string) error {
	base := strings.TrimSuffix(path, filepath.Ext(path))
	var text bytes.Buffer
	err := page.Execute(&text, struct {
		*results
		Base string
	}{r, filepath.Base(base)})
	if err != nil {
		return fmt.Errorf("bench: write page: %w", err)
	}
	if err := os.WriteFile(path, text.Bytes(), 0o644); err != nil {
		return fmt.Errorf("bench: write page: %w", err)
	}
	for name, svg := range r.plots() {
		if err := os.WriteFile(base+"-"+name+".svg", svg, 0o644); err != nil {
			return fmt.Errorf("bench: write plot: %w", err)
		}
	}
	return nil
}

// num is a number to be read: three digits, more only before the point.
func num(v float64) string { return digits(v, 3) }

// exact is num for what is held against a limit.
func exact(v float64) string { return digits(v, 4) }

func digits(v float64, n int) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "–"
	case a < 0.005:
		return "0"
	case v == math.Trunc(v) && a < 1000:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 1000:
		text := strconv.FormatFloat(math.Round(v), 'f', -1, 64)
		for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
			text = text[:i] + "," + text[i:]
		}
		return text
	default:
		before := int(math.Floor(math.Log10(a))) + 1
		return strconv.FormatFloat(v, 'f', max(n-max(before, 1), 0), 64)
	}
}

func percent(part float64) string { return num(100*part) + " %" }

// ratio is the median of ratios with their spread.
func ratio(s samples) string { return exact(s.median()) + plusMinus(s) }

// plusMinus is the spread, if there is one to tell.
func plusMinus(s samples) string {
	if len(s) < 2 || s.median() == 0 {
		return ""
	}
	return fmt.Sprintf(" ± %.0f %%", 100*s.spread())
}
