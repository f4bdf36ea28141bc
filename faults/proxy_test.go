package main

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestVerbOf(t *testing.T) {
	command := func(args ...string) (b [][]byte) {
		for _, a := range args {
			b = append(b, []byte(a))
		}
		return b
	}
	for _, test := range []struct {
		args []string
		want verb
	}{
		{nil, verbOther},
		{[]string{"hello", "3"}, verbOther},
		{[]string{"client", "setinfo", "LIB-NAME", "x"}, verbOther},
		{[]string{"SET", "k", "v", "NX", "GET", "PX", "1000"}, verbAcquire},
		{[]string{"set", "k", "v", "px", "500"}, verbOther},
		{[]string{"evalsha", "sha", "1", "k", "v"}, verbRelease},
		{[]string{"eval", "script", "1", "k", "v", "1000"}, verbExtend},
		{[]string{"evalsha", "sha", "1", "k", "v", "marker", "2000"}, verbRelease},
	} {
		if got := verbOf(command(test.args...)); got != test.want {
			t.Errorf("%v: %q, want %q", test.args, got, test.want)
		}
	}
}

func TestParseCommand(t *testing.T) {
	whole := "*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n*1\r\n$4\r\nPING\r\n"
	args, rest, ok := parseCommand([]byte(whole))
	if !ok || len(args) != 2 || string(args[1]) != "a\r\nb" || string(rest) != "*1\r\n$4\r\nPING\r\n" {
		t.Fatalf("%q, %q, %v", args, rest, ok)
	}
	for i := range len(whole) - len(rest) {
		if _, _, ok := parseCommand([]byte(whole[:i])); ok {
			t.Errorf("%q passes for a whole command", whole[:i])
		}
	}
	for _, bad := range []string{"*-1\r\n", "*x\r\n", "PING\r\n", "*1\r\n:1\r\n", "*1\r\n$-1\r\n"} {
		if _, _, ok := parseCommand([]byte(bad)); ok {
			t.Errorf("%q passes for a command", bad)
		}
	}
}

// TestProxy wants each trouble to do what it is called, with a real client and server.
func TestProxy(t *testing.T) {
	t.Parallel()
	s, err := startServer(t.Context(), serverProgram(t), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	p, err := newProxy(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	client := func(retries int) *redis.Client {
		c := redis.NewClient(&redis.Options{Addr: p.addr, MaxRetries: retries, ReadTimeout: 200 * time.Millisecond})
		t.Cleanup(func() { c.Close() })
		return c
	}
	once, patient := client(-1), client(3)
	count := func() int64 { // the commands that reached Redis, seen from beside the proxy
		n, err := s.client.Get(t.Context(), "n").Int64()
		if err != nil && !errors.Is(err, redis.Nil) {
			t.Fatal(err)
		}
		return n
	}
	incr := func(c *redis.Client) error { return c.Incr(t.Context(), "n").Err() }
	if err := incr(once); err != nil || count() != 1 {
		t.Fatalf("without trouble: %v", err)
	}

	var timeout net.Error
	p.set(trouble{hangUp: true})
	if err := incr(once); !errors.As(err, &timeout) || count() != 1 {
		t.Errorf("requests lost: %v, count %d", err, count())
	}
	p.cut() // what hangs must not arrive later in this test
	p.set(trouble{hangDn: true})
	conn := client(-1).Conn() // its greeting hangs already
	if err := conn.Ping(t.Context()).Err(); err == nil {
		t.Error("replies lost, and yet one came")
	}
	conn.Close()
	p.cut()
	p.set(trouble{refuse: true})
	if err := incr(once); err == nil {
		t.Error("refused, and yet it answered")
	}
	p.set(trouble{delay: 50 * time.Millisecond})
	if began := time.Now(); incr(patient) != nil || time.Since(began) < 100*time.Millisecond {
		t.Errorf("latency: took %v", time.Since(began))
	}
	p.set(trouble{})
	p.cut()
	if err := incr(patient); err != nil {
		t.Errorf("after it all: %v", err)
	}

	for _, silent := range []bool{false, true} {
		p.swallow(verbAcquire, silent)
		before := p.swallowed()
		key := "closed"
		if silent {
			key = "silent"
		}
		err := once.Do(t.Context(), "set", key, "v", "nx", "get", "px", 60000).Err()
		if err == nil || p.swallowed() != before+1 {
			t.Errorf("%s: %v, %d replies swallowed", key, err, p.swallowed()-before)
		}
		if v, err := s.client.Get(t.Context(), key).Result(); v != "v" {
			t.Errorf("%s: the command was not done: %q, %v", key, v, err)
		}
		if err := incr(once); err != nil {
			t.Errorf("%s: the next command: %v", key, err)
		}
	}
}
