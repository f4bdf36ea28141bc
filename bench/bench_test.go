package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestSamples(t *testing.T) {
	s := samples{5, 1, 4, 2, 3}
	if m, spread := s.median(), s.spread(); m != 3 || math.Abs(spread-1.0/3) > 1e-9 {
		t.Errorf("median %v, spread %v, want 3 and 1/3", m, spread)
	}
	if m := (samples{1, 2}).median(); m != 1.5 {
		t.Errorf("median of two: %v, want 1.5", m)
	}
	if !math.IsNaN(samples(nil).median()) || (samples{7}).spread() != 0 {
		t.Error("no values have a median, or one has a spread")
	}
	if got := (samples{2, 9, 8}).over(samples{1, 3, 2}); !slices.Equal(got, samples{2, 3, 4}) {
		t.Errorf("ratios: %v", got)
	}
	if got := (samples{2, 9}).minus(samples{1, 3}); !slices.Equal(got, samples{1, 6}) {
		t.Errorf("differences: %v", got)
	}
	if s[0] != 5 {
		t.Error("the order of the rounds is gone")
	}
}

func TestInterleave(t *testing.T) {
	var order []string
	got, err := interleave(2, []string{"a", "b"}, func(name string, round int) (float64, error) {
		order = append(order, fmt.Sprint(name, round))
		return float64(round), nil
	})
	if err != nil || !slices.Equal(order, []string{"a0", "b0", "b1", "a1", "a2", "b2"}) || !slices.Equal(got["a"], samples{1, 2}) {
		t.Errorf("%v, order %v, values %v", err, order, got)
	}
	failed := errors.New("failed")
	if _, err := interleave(2, []string{"a"}, func(string, int) (float64, error) { return 0, failed }); !errors.Is(err, failed) {
		t.Errorf("got %v, want what the measurement said", err)
	}
}

func TestNum(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.001: "0", 0.05: "0.05", 1: "1", 1.5: "1.50", 12.34: "12.3", 99.96: "100.0", 123.4: "123", 1234.5: "1,235", -1234567: "-1,234,567", math.NaN(): "–",
	} {
		if got := num(v); got != want {
			t.Errorf("num(%v) = %s, want %s", v, got, want)
		}
	}
}

// TestSides checks that each side is a lock: it excludes while the work runs, and is free afterwards.
func TestSides(t *testing.T) {
	env := tried(t)
	for _, name := range slices.Concat(plain, piped) {
		t.Run(name, func(t *testing.T) {
			s, err := open(name, env.s.addr, 1)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.close(); err != nil {
					t.Error(err)
				}
			}()
			for range 2 {
				ran := false
				err := s.do(t.Context(), "name", func(ctx context.Context) error {
					ran = true
					return s.do(ctx, "other name", nothing)
				})
				if !ran || err != nil {
					t.Fatalf("ran %v, %v", ran, err)
				}
			}
			err = s.do(t.Context(), "name", func(ctx context.Context) error {
				return s.do(ctx, "name", func(context.Context) error {
					t.Error("two at once")
					return nil
				})
			})
			if err == nil {
				t.Error("the second did not fail")
			}
		})
	}
}

// TestMeasurements runs each measurement of this file's neighbours once, for a moment.
func TestMeasurements(t *testing.T) {
	env := tried(t)
	s, err := open(ours, env.s.addr, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if micros, err := pairMicros(t.Context(), s, 4, env.window()); err != nil || micros <= 0 {
		t.Errorf("a pair: %v µs, %v", micros, err)
	}
	for _, s := range []side{{}, s} {
		if rate, err := taskRate(t.Context(), env, s, 0); err != nil || rate <= 0 {
			t.Errorf("%s: %v tasks/s, %v", s.name, rate, err)
		}
	}
	counts, sizes, err := allocations(t.Context(), env)
	if err != nil || counts[bare].median() < 10 || sizes[bare].median() < 100 {
		t.Errorf("the bare pair: %v allocations of %v bytes, %v", counts[bare], sizes[bare], err)
	}
	commands, process, err := serverCPU(t.Context(), env)
	if err != nil || len(commands[rueidisL]) != env.pairRounds() || len(process[rueidisL]) != env.pairRounds() {
		t.Errorf("server: %v in commands, %v in all, %v", commands, process, err)
	}
}

func TestSidesFail(t *testing.T) {
	failed := errors.New("failed")
	var n atomic.Int64
	s := side{do: func(context.Context, string, func(context.Context) error) error {
		if n.Add(1) > 10 {
			return failed
		}
		return nil
	}}
	if _, err := pairMicros(t.Context(), s, 2, time.Second); !errors.Is(err, failed) {
		t.Errorf("got %v, want what the side said", err)
	}
}

// madeUp are results in which redislock costs so many times what everything else does.
func madeUp(cost float64) *results {
	of := func(v float64) samples { return samples{v, v * 1.02, v * 0.98} }
	by := func(names []string, v, cost float64) map[string]samples {
		all := make(map[string]samples)
		for _, name := range names {
			all[name] = of(v)
		}
		all[ours], all[oursPiped] = of(v*cost), of(v*cost/2.6)
		return all
	}
	r := &results{
		Machine: machine{CPU: "processor", OS: "linux/amd64", Go: "go1.26", Server: "Redis 7.0", Date: "2026-01-02", Cores: 2, Rounds: 3, Modules: []string{"redis/go-redis/v9 v9.1"}},
		pairs:   make(map[int]map[string]samples), tasks: make(map[time.Duration]map[string]samples),
		allocs: by(plain, 10, cost), bytes: by(plain, 1000, cost*2), commands: by(plain, 5, cost), process: by(plain, 20, cost),
		skips:    []skipRow{{"duplicate skipped, the lock is held by another process", math.Round(cost)}, {"duplicate skipped, the lock is held by this process", math.Floor(cost)}},
		handOver: handOver{local: of(0.0009 * cost), remote: []remoteWait{{0.5, of(0.04 * cost)}}},
		holdings: []holding{{locks: 10_000, rounds: 3, ttl: 15 * time.Second}, {locks: 100_000, rounds: 3, ttl: time.Minute}},
		native:   []nativeRow{{"Redis 7.0", "release", "EVALSHA", of(50), of(5)}, {"Redis 7.0", "release", "DELIFEQ", nil, nil}},
	}
	for _, g := range concurrency {
		r.pairs[g] = by(slices.Concat(plain, piped), 100, cost)
	}
	for _, busy := range handlerTimes {
		r.tasks[busy] = by(locksOfTasks, 10_000, 1/cost)
	}
	for _, h := range r.holdings {
		for _, name := range []string{ours, bsmAlive, rueidisL} {
			row := heldRow{side: name, locks: h.locks, heap: of(2000), goroutines: of(1), cpu: of(0.1), server: of(0.1)}
			if name == ours {
				row = heldRow{side: name, locks: h.locks, heap: of(1000 * cost), goroutines: of(math.Floor(cost)), cpu: of(0.1 * cost), server: of(0.1), lost: int(cost)}
			}
			r.held = append(r.held, row)
		}
	}
	r.held = append(r.held, heldRow{side: redsyncAlive, locks: 100_000})
	return r
}

func TestPage(t *testing.T) {
	for name, cost := range map[string]float64{"met": 0.9, "missed": 2.9} {
		t.Run(name, func(t *testing.T) {
			r := madeUp(cost)
			path := filepath.Join(t.TempDir(), "performance.md")
			if err := r.write(path); err != nil {
				t.Fatal(err)
			}
			for _, x := range r.targets() {
				if x.met != (name == "met") {
					t.Errorf("%s, %s: %s, met: %v", x.work, x.aim, x.value, x.met)
				}
			}
			checkPage(t, path)
		})
	}
}

// checkPage looks for what a template does with values that are not there, and for its pictures.
func checkPage(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"NaN", "Inf", "<no value>", "%!"} {
		if i := strings.Index(string(text), bad); i >= 0 {
			t.Errorf("%s in the page: …%s", bad, text[max(i-100, 0):i+len(bad)])
		}
	}
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(string(text), "](")[1:] {
		link, _, _ := strings.Cut(part, ")")
		page, heading, ok := strings.Cut(link, "#")
		if !ok {
			if svg, err := os.ReadFile(filepath.Join(filepath.Dir(path), link)); err != nil || !strings.HasPrefix(string(svg), "<svg") {
				t.Errorf("picture %s: %v", link, err)
			}
			continue
		}
		in := string(text)
		if page != "" {
			in = string(readme)
		}
		if !strings.Contains(strings.ToLower(in), "\n## "+strings.ReplaceAll(heading, "-", " ")+"\n") {
			t.Errorf("no section %s", link)
		}
	}
}

func TestQuick(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: takes a minute")
	}
	env := &environment{program: tried(t).program, quick: true}
	path := filepath.Join(t.TempDir(), "performance.md")
	if err := run(t.Context(), env, path); err != nil {
		t.Fatal(err)
	}
	checkPage(t, path)
}

func TestTooFewRounds(t *testing.T) {
	if err := run(t.Context(), &environment{rounds: 1}, ""); err == nil || !strings.Contains(err.Error(), "-rounds") {
		t.Errorf("got %v, want an error that names the flag", err)
	}
}

// BenchmarkPair is for profiles.
func BenchmarkPair(b *testing.B) {
	s, err := startServer("redis-server")
	if err != nil {
		b.Skip(err)
	}
	defer s.stop()
	for _, name := range plain {
		b.Run(name, func(b *testing.B) {
			s, err := open(name, s.addr, 1)
			if err != nil {
				b.Fatal(err)
			}
			defer s.close()
			b.ReportAllocs()
			for b.Loop() {
				if err := s.do(b.Context(), "pair", nothing); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
