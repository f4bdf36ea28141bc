package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// tried is an environment for a quick try, with a server that ends with the test.
func tried(t *testing.T) *environment {
	t.Helper()
	program, err := exec.LookPath("redis-server")
	switch {
	case err != nil && os.Getenv("REDISLOCK_REQUIRE_SERVERS") != "":
		t.Fatal("REDISLOCK_REQUIRE_SERVERS is set and redis-server not found")
	case err != nil:
		t.Skip("skipped: redis-server not found")
	}
	s, err := startServer(program)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	})
	return &environment{program: program, s: s, rounds: 1, quick: true}
}

func TestHoldMany(t *testing.T) {
	env := tried(t)
	h := holding{locks: 200, rounds: 1, ttl: 4 * time.Second}
	for _, name := range []string{ours, bsmAlive, redsyncAlive, rueidisL} {
		row := heldRow{side: name, locks: h.locks}
		if err := holdMany(t.Context(), env.s.addr, h, &row); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if row.lost != 0 || row.heap[0] <= 0 || row.cpu[0] <= 0 || row.server[0] <= 0 {
			t.Errorf("%s: %+v", name, row)
		}
		if each := row.goroutines[0]; (name == ours) != (each < 0.5) {
			t.Errorf("%s: %.2f goroutines for each lock", name, each)
		}
	}
}

func TestHoldManySeesLosses(t *testing.T) {
	env := tried(t)
	rdb := client(env.s.addr)
	defer rdb.Close()
	h := holding{locks: 50, rounds: 1, ttl: 4 * time.Second, held: func() {
		if err := rdb.FlushAll(t.Context()).Err(); err != nil {
			t.Error(err)
		}
	}}
	row := heldRow{side: ours, locks: h.locks}
	if err := holdMany(t.Context(), env.s.addr, h, &row); err != nil || row.lost < h.locks {
		t.Errorf("%v, %d lost, want at least %d", err, row.lost, h.locks)
	}
}

func TestTakeAllUnable(t *testing.T) {
	env := tried(t)
	s, err := ourSide(client(env.s.addr))
	if err != nil {
		t.Fatal(err)
	}
	release, err := takeAll(t.Context(), s, make([]func(), 100), 0)
	release()
	if !errors.Is(err, errUnable) {
		t.Errorf("without time: %v, want errUnable", err)
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
}

func TestHandOvers(t *testing.T) {
	env, began := tried(t), time.Now()
	h, err := handOvers(t.Context(), env)
	if err != nil {
		t.Fatal(err)
	}
	all := time.Since(began).Seconds()
	if m := h.local.median(); !(m > 0 && m <= all) { // nor without samples
		t.Errorf("in one process after %v s", m)
	}
	for _, r := range h.remote {
		if m := r.late.median(); !(m > 0 && m <= all) {
			t.Errorf("between processes, after %v s of waiting: %v s late", r.waited, m)
		}
	}
	if len(h.remote) != 2 {
		t.Errorf("%d rows between processes, want 2", len(h.remote))
	}
}

func TestSkipTrips(t *testing.T) {
	rows, err := skipTrips(t.Context(), tried(t))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []float64{1, 0, 1, 2, 1, 2} {
		if rows[i].trips != want {
			t.Errorf("%s: %v round trips, want %v", rows[i].what, rows[i].trips, want)
		}
	}
}

func TestNativeForms(t *testing.T) {
	env := tried(t)
	rows, err := formsOf(t.Context(), env, env.program)
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != len(forms) {
		t.Fatalf("%d rows, want one for each form", len(rows))
	}
	for _, r := range rows {
		if len(r.micros) != len(r.cpu) || r.form == "EVALSHA" && len(r.micros) != env.rounds {
			t.Errorf("%+v", r)
		}
	}
}

func TestServerPrograms(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("REDISLOCK_SERVERS", dir)
	t.Setenv("PATH", "")
	newer := dir + "/valkey-9"
	if err := os.WriteFile(newer, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if found, err := serverPrograms(newer); err != nil || len(found) != 1 || found[0] != newer {
		t.Errorf("%v, %v, want %s once", found, err, newer)
	}
}

func TestChart(t *testing.T) {
	odd := []float64{0, 1, 10, math.NaN(), math.Inf(1)}
	lines := []line{{"a < b & \"c\"", odd, odd}, {"zeros", []float64{0, 0}, []float64{0, 0}}, {"none", nil, nil}, {"one", []float64{5}, []float64{5}}}
	for name, c := range map[string]plot{
		"logarithmic": {"title <>", "x", "y &", true, lines},
		"linear":      {"title", "x", "y", false, lines},
		"no values":   {"title", "x", "y", true, lines[1:3]},
		"no lines":    {"title", "x", "y", false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			svg := chart(c)
			if bytes.Contains(svg, []byte("NaN")) || bytes.Contains(svg, []byte("Inf")) {
				t.Errorf("not a number in\n%s", svg)
			}
			var words []string
			for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
				token, err := d.Token()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatalf("%v in\n%s", err, svg)
				}
				if data, ok := token.(xml.CharData); ok {
					words = append(words, string(data))
				}
			}
			for _, l := range c.lines {
				if !strings.Contains(strings.Join(words, "\n"), l.name) {
					t.Errorf("%q is not in the picture", l.name)
				}
			}
		})
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 1: "1", 0.001: "0.001", 3 * 0.1: "0.3", 512: "512", 1000: "1,000", 100000: "100,000", 1234567: "1,234,567"} {
		if got := number(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}
