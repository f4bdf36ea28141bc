package main

import (
	"fmt"
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
		{[]string{"evalsha", "sha", "2", "k", "k:fence", "v", "1000", "86400000"}, verbAcquire},
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

// TestHop wants a swallowed reply to be that of a command that was done, and nothing else to be missing.
func TestHop(t *testing.T) {
	t.Parallel()
	s := testServer(t)
	told := make(chan string, 10)
	h, err := newHop(s.addr, func(v verb, silent bool) { told <- fmt.Sprint(v, " ", silent) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.close)
	client := redis.NewClient(&redis.Options{Addr: h.addr, MaxRetries: -1, ReadTimeout: 200 * time.Millisecond})
	t.Cleanup(func() { client.Close() })
	for key, silent := range map[string]bool{"closed": false, "silent": true} {
		h.swallow(verbAcquire, silent)
		if err := client.Incr(t.Context(), "n").Err(); err != nil || len(told) > 0 {
			t.Errorf("%s: another command: %v, and %d replies swallowed", key, err, len(told))
		}
		err := client.Do(t.Context(), "set", key, "v", "nx", "get", "px", 60000).Err()
		if err == nil {
			t.Errorf("%s: a reply has come", key)
		}
		select {
		case got := <-told:
			if want := fmt.Sprint("acquire ", silent); got != want {
				t.Errorf("%s: told of %q, want %q", key, got, want)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: told of nothing", key)
		}
		if v, err := s.client.Get(t.Context(), key).Result(); v != "v" {
			t.Errorf("%s: the command was not done: %q, %v", key, v, err)
		}
		if err := client.Incr(t.Context(), "n").Err(); err != nil {
			t.Errorf("%s: the next command: %v", key, err)
		}
	}
	other := testServer(t)
	h.retarget(other.addr)
	retrying := redis.NewClient(&redis.Options{Addr: h.addr})
	t.Cleanup(func() { retrying.Close() })
	if err := retrying.Set(t.Context(), "where", "other", 0).Err(); err != nil {
		t.Error(err)
	}
	if v := other.client.Get(t.Context(), "where").Val(); v != "other" {
		t.Errorf("led to another server, and there is %q", v)
	}
}
