package main

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

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
