package main

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestScheduleReplays(t *testing.T) {
	const long = 2 * time.Minute
	for _, c := range classes {
		seed := rand.Uint64()
		plan := schedule(c, seed, 8, long)
		if !slices.Equal(plan, schedule(c, seed, 8, long)) {
			t.Errorf("%s: one seed, two plans", c.name)
		}
		done := make(map[string]int)
		for _, s := range plan {
			done[s.fault]++
			if s.at+s.lasts > long {
				t.Errorf("%s: %s lasts beyond the end", c.name, s.fault)
			}
		}
		if missing := c.missing(done); len(missing) > 0 && c.name != "mixed" || c.every > 0 && len(plan) < 15 {
			t.Errorf("%s: %d faults in %v, without %v", c.name, len(plan), long, missing)
		}
		shorter := schedule(c, seed, 8, long-10*time.Second)
		same := 0
		for same < len(shorter) && shorter[same] == plan[same] {
			same++
		}
		if c.every > 0 && plan[same].at+plan[same].lasts < long-10*time.Second {
			t.Errorf("%s: a shorter plan differs at %v", c.name, plan[same].at)
		}
	}
}

func TestShorten(t *testing.T) {
	short := shorten(classes, 6*time.Second)
	for _, c := range short {
		if c.least > 0 || c.every > time.Second {
			t.Errorf("%s: %v at least, a fault every %v", c.name, c.least, c.every)
		}
	}
	if len(short) < len(classes)-1 {
		t.Errorf("%d of %d classes", len(short), len(classes))
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
