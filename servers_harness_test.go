package redislock

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// impatient makes a client give up soon and not try again, where no answer is expected.
func impatient(o *redis.Options) {
	o.MaxRetries = -1
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 200*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond
}

func TestServerLife(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Log(s.version())
		ctx := t.Context()
		c := s.client(t)
		if err := c.Set(ctx, "k", "v", 0).Err(); err != nil {
			t.Fatal(err)
		}
		s.pause()
		var timeout net.Error
		if err := s.client(t, impatient).Get(ctx, "k").Err(); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("while paused: %v, want a timeout", err)
		}
		s.resume()
		if v, err := c.Get(ctx, "k").Result(); v != "v" || err != nil {
			t.Errorf("after resume: %q, %v", v, err)
		}

		s.kill()
		if err := s.client(t, impatient).Get(ctx, "k").Err(); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("after kill: %v, want connection refused", err)
		}
		s.restart()
		if err := s.client(t).Get(ctx, "k").Err(); !errors.Is(err, redis.Nil) {
			t.Errorf("after restart: %v, want an empty server", err)
		}
		pid := s.cmd.Process.Pid
		s.restart() // of a running one
		if s.cmd.Process.Pid == pid {
			t.Error("restart kept the process")
		}
	})
}

func TestServerArgs(t *testing.T) {
	eachProgram(t, func(t *testing.T, program string) {
		s := startServer(t, program, "--appendonly", "yes", "--appendfsync", "always", "--requirepass", "sesame")
		password := func(o *redis.Options) { o.Password = "sesame" }
		if err := s.client(t, password).Set(t.Context(), "k", "v", 0).Err(); err != nil {
			t.Fatal(err)
		}
		s.restart()
		if v, err := s.client(t, password).Get(t.Context(), "k").Result(); v != "v" || err != nil {
			t.Errorf("after restart with a journal: %q, %v", v, err)
		}
	})
}

func TestServerEndsWithTheTest(t *testing.T) {
	eachProgram(t, func(t *testing.T, program string) {
		for name, before := range map[string]func(*server){
			"running": func(*server) {},
			"paused":  (*server).pause,
			"killed":  (*server).kill,
		} {
			var s *server
			t.Run(name, func(t *testing.T) {
				s = startServer(t, program)
				before(s)
			})
			if !isClosed(s.exited) {
				t.Errorf("%s: still there after its test", name)
			}
			if conn, err := net.Dial("tcp", s.addr); err == nil {
				conn.Close()
				t.Errorf("%s: %s still answers after its test", name, s.addr)
			}
		}
	})
}

func TestServerTakesAnotherPort(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		rival := &server{program: s.program, t: t, dir: t.TempDir(), addr: s.addr, args: s.args}
		if err := rival.start(); err == nil || !strings.Contains(rival.log(), addressInUse) {
			t.Fatalf("start on a taken port: %v, want %q in its log:\n%s", err, addressInUse, rival.log())
		}
		if !isClosed(rival.exited) {
			t.Error("still there after it failed")
		}
	})
}

func TestServerPrograms(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("REDISLOCK_SERVERS", dir)
	t.Setenv("PATH", "")
	if err := os.WriteFile(filepath.Join(dir, "valkey-9"), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	found, missing := serverPrograms()
	if len(found) != 1 || found["valkey-9"] != filepath.Join(dir, "valkey-9") || len(missing) != 3 {
		t.Errorf("found %v, missing %v", found, missing)
	}
}

func TestClusterServer(t *testing.T) {
	eachProgram(t, func(t *testing.T, program string) {
		t.Parallel() // each waits two seconds for its node
		c := clusterServer(t, program)
		for _, key := range []string{"a", "b", "c{d}"} {
			if err := c.Set(t.Context(), key, "v", 0).Err(); err != nil {
				t.Errorf("set %s: %v", key, err)
			}
		}
		if err := c.MGet(t.Context(), "a", "b").Err(); err == nil || !strings.HasPrefix(err.Error(), "CROSSSLOT") {
			t.Errorf("keys of two slots: %v, want CROSSSLOT", err)
		}
	})
}

func TestProxy(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		ctx := t.Context()
		p := newProxy(t, s.addr)
		through := func(o *redis.Options) { o.Addr = p.addr }
		c := s.client(t, through)
		once := s.client(t, through, impatient)
		get := func(c *redis.Client) error { return c.Get(ctx, "k").Err() }
		if err := c.Set(ctx, "k", "v", 0).Err(); err != nil {
			t.Fatal(err)
		}

		p.cut()
		if err := get(c); err != nil {
			t.Errorf("after cut, a client that tries again: %v", err)
		}

		p.refuse()
		if err := get(once); err == nil {
			t.Error("refused, and yet it answered")
		}
		p.restore()
		if err := get(c); err != nil {
			t.Errorf("after refuse and restore: %v", err)
		}

		p.hang()
		var timeout net.Error
		if err := get(once); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("while hanging: %v, want a timeout", err)
		}
		blocked := make(chan error, 1)
		go func() { blocked <- get(c) }()
		select {
		case err := <-blocked:
			t.Errorf("answered while hanging: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		p.restore()
		if err := <-blocked; err != nil {
			t.Errorf("held back, then let through: %v", err)
		}
	})
}

// TestProxySwallow shows what the idempotent acquire is for: go-redis sends SET NX a second time when the reply to the
// first was lost, and finds its own value.
func TestProxySwallow(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		ctx, cancel := context.WithTimeout(t.Context(), serverWait)
		defer cancel()
		p := newProxy(t, s.addr)
		c := s.client(t, func(o *redis.Options) { o.Addr = p.addr })
		swallowed := p.swallow("The-Key")
		got, err := c.Do(ctx, "SET", "the-key", "mine", "NX", "GET", "PX", 5000).Text()
		if got != "mine" || err != nil {
			t.Errorf("SET NX GET sent twice: %q, %v; want its own value", got, err)
		}
		select {
		case <-swallowed:
		case <-ctx.Done():
			t.Error("no reply was swallowed")
		}
		if v, err := c.Get(ctx, "the-key").Result(); v != "mine" || err != nil {
			t.Errorf("afterwards: %q, %v", v, err)
		}
	})
}
