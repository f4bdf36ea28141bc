package main

import (
	"context"
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
	c := campaign{
		class: chosen[0], server: serverProgram(t), dir: t.TempDir(), seed: 7,
		duration: 6 * time.Second, drain: time.Second, workers: 4, keys: 16, rate: 200,
	}
	records, err := c.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f := history.Check(records, terms)
	var text strings.Builder
	report(&text, c.class, f)
	t.Log("\n" + text.String())
	for _, v := range f.Violations {
		t.Errorf("%s: %s", v.Kind, v.Text)
	}
	if f.Cycles < 20 || len(f.Faults) < 5 {
		t.Errorf("%d lock cycles and %d kinds of faults are too few to say anything", f.Cycles, len(f.Faults))
	}
	for _, s := range c.slots {
		if !s.process.ended() {
			t.Errorf("%s still runs", s.current)
		}
	}
	for _, s := range []*server{c.locks, c.queue} {
		if !s.process.ended() {
			t.Errorf("the server on %s still runs", s.addr)
		}
	}
}

// TestCampaignEndsItsProcesses breaks a campaign off in the middle.
func TestCampaignEndsItsProcesses(t *testing.T) {
	t.Parallel()
	c := campaign{
		class: class{name: "none"}, server: serverProgram(t), dir: t.TempDir(), seed: 1,
		duration: time.Minute, drain: time.Minute, workers: 2, keys: 8, rate: 50,
	}
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
	if !c.locks.process.ended() || !c.queue.process.ended() {
		t.Error("a server still runs")
	}
}
