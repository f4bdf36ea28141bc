package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"example.com/redislock/faults/history"
)

// TestMain makes this binary a worker where a campaign starts it as one.
func TestMain(m *testing.M) {
	if config, ok := os.LookupEnv(workerEnv); ok {
		exit(runWorker(config))
	}
	os.Exit(m.Run())
}

func serverProgram(t *testing.T) string {
	t.Helper()
	program, err := findServer("")
	if err != nil && os.Getenv("REDISLOCK_REQUIRE_SERVERS") != "" {
		t.Fatal(err)
	}
	if err != nil {
		t.Skip(err)
	}
	return program
}

// TestCampaign runs a short campaign with everything in it.
func TestCampaign(t *testing.T) {
	t.Parallel()
	chosen, err := chooseClasses("mixed")
	if err != nil {
		t.Fatal(err)
	}
	c := &campaign{class: chosen[0], dir: t.TempDir(), params: params{
		server: serverProgram(t), seed: 7, duration: 6 * time.Second, drain: time.Second, workers: 4, keys: 24, rate: 200,
	}}
	records, err := c.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f := c.check(records)
	var text strings.Builder
	report(&text, c, f)
	t.Log("\n" + text.String())
	for _, v := range f.Violations {
		t.Errorf("%s: %s", v.Kind, v.Text)
	}
	if c.order.Operations < 100 || c.order.Unknown > 0 {
		t.Errorf("the model read %d operations, and gave up %d pieces", c.order.Operations, c.order.Unknown)
	}
	if f.Writes < 3 {
		t.Errorf("%d fenced writes are too few", f.Writes)
	}
	if f.Cycles < 20 || len(f.Faults) < 5 {
		t.Errorf("%d lock cycles and %d kinds of faults are too few to say anything", f.Cycles, len(f.Faults))
	}
	for _, s := range c.slots {
		if !s.process.ended() {
			t.Errorf("%s still runs", s.current)
		}
	}
	for _, s := range c.servers {
		if !s.process.ended() {
			t.Errorf("the server on %s still runs", s.addr)
		}
	}
}

// TestCampaignEndsItsProcesses breaks a campaign off in the middle.
func TestCampaignEndsItsProcesses(t *testing.T) {
	t.Parallel()
	c := &campaign{class: class{name: "none", replica: true, queue: true}, dir: t.TempDir(), params: params{
		server: serverProgram(t), seed: 1, duration: time.Minute, drain: time.Minute, workers: 2, keys: 8, rate: 50,
	}}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	go func() { // until the last worker is at work
		for sleep(ctx, 10*time.Millisecond) {
			if info, err := os.Stat(filepath.Join(c.dir, "w1-1.jsonl")); err == nil && info.Size() > 0 {
				cancel()
			}
		}
	}()
	if _, err := c.run(ctx); err == nil {
		t.Fatal("no error, though it was broken off")
	}
	for _, s := range c.slots {
		if !s.process.ended() {
			t.Errorf("%s still runs", s.current)
		}
	}
	if len(c.servers) != 3 {
		t.Errorf("%d servers", len(c.servers))
	}
	for _, s := range c.servers {
		if !s.process.ended() {
			t.Errorf("the server on %s still runs", s.addr)
		}
	}
}

// TestProgress counts a history that is being written: half a line waits for its other half.
func TestProgress(t *testing.T) {
	p := progress{dir: t.TempDir()}
	write := func(text string) {
		file, err := os.OpenFile(filepath.Join(p.dir, "w0-1.jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if _, err := file.WriteString(text); err != nil {
			t.Fatal(err)
		}
		if err := p.update(); err != nil {
			t.Fatal(err)
		}
	}
	write("{\"kind\":\"released\"}\n{\"kind\":\"los")
	if p.cycles != 1 {
		t.Errorf("%d cycles, want 1", p.cycles)
	}
	write("t\"}\n{\"kind\":\"ran\"}\n{\"kind\":\"fault\",\"fault\":\"cut\"}\n")
	if p.cycles != 2 || p.faults["cut"] != 1 {
		t.Errorf("%d cycles, %v", p.cycles, p.faults)
	}
}

func TestExcess(t *testing.T) {
	var e excess
	jumps := 0
	jump := func() error { jumps++; return nil }
	for range 2 {
		if err := e.add(time.Minute, jump); err != nil {
			t.Fatal(err)
		}
	}
	if d := e.now(); jumps != 2 || d <= time.Minute || d > 2*time.Minute {
		t.Errorf("after %d jumps: %v", jumps, d)
	}
	for _, test := range []struct{ by, low, high time.Duration }{
		{-30 * time.Second, time.Minute, 90 * time.Second},
		{-time.Hour, 0, 0},                           // no credit for what jumps back later
		{time.Minute, 30 * time.Second, time.Minute}, // no debt either
	} {
		if err := e.add(test.by, jump); err != nil {
			t.Fatal(err)
		}
		if d := e.now(); d < test.low || d > test.high {
			t.Errorf("after a jump by %v: %v", test.by, d)
		}
	}
	failure := errors.New("down")
	if err := e.add(time.Second, func() error { return failure }); err != failure {
		t.Error(err)
	}
}

func TestCheckEnough(t *testing.T) {
	for name, test := range map[string]struct {
		cycles int
		done   map[string]int
		excuse string
		given  int // up, of 100 pieces
		want   int
	}{
		"enough":            {100, map[string]int{faultCut: 1}, history.ExcuseDeaf, 5, 0},
		"too few cycles":    {99, map[string]int{faultCut: 1}, history.ExcuseStall, 0, 1},
		"another's fault":   {100, map[string]int{faultHang: 1}, history.ExcuseKilled, 0, 1},
		"no fault, nothing": {0, nil, history.ExcuseOpen, 0, 2},
		"another's excuse":  {100, map[string]int{faultCut: 1}, history.ExcuseLoss, 0, 1},
		"given up":          {100, map[string]int{faultCut: 1}, history.ExcuseDeaf, 6, 1},
	} {
		c := &campaign{class: class{promise: allowDeaf, every: time.Second, faults: []string{faultCut, faultRefuse}}, params: params{cycles: 100}}
		c.order.Pieces, c.order.Unknown = 100, test.given
		f := history.Findings{Cycles: test.cycles, Faults: test.done, Unlocked: 1, Excused: map[string]int{test.excuse: 1}}
		if c.checkEnough(&f); len(f.Violations) != test.want {
			t.Errorf("%s: %v", name, f.Violations)
		}
	}
}

// TestRows wants a table: one head, and rows with as many cells.
func TestRows(t *testing.T) {
	name := filepath.Join(t.TempDir(), "table.md")
	for _, class := range classes[:3] {
		c := &campaign{class: class, version: "redis 7.0.0", params: params{seed: 5, short: true}}
		if err := appendRow(name, c, history.Findings{Cycles: 3, Faults: map[string]int{"cut": 2}}); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) != 5 {
		t.Errorf("%d lines, want a head of two and three rows:\n%s", len(lines), text)
	}
	for _, line := range lines {
		if strings.Count(line, "|") != strings.Count(lines[0], "|") {
			t.Errorf("cells: %s", line)
		}
	}
	if !strings.Contains(lines[2], "-seed 5 -short") {
		t.Errorf("a row that does not say how to run it again: %s", lines[2])
	}
}
