package main

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func testServer(t *testing.T) *server {
	t.Helper()
	s, err := startServer(t.Context(), serverProgram(t), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	return s
}

// proxied is a proxy with a server behind it and a counter there, to see which commands arrive.
type proxied struct {
	*proxy
	t      *testing.T
	server *server
}

func newProxied(t *testing.T) *proxied {
	t.Helper()
	s := testServer(t)
	p, err := newProxy(s.addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return &proxied{p, t, s}
}

func (p *proxied) client() *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: p.addr, MaxRetries: -1, ReadTimeout: 300 * time.Millisecond, PoolSize: 1})
	p.t.Cleanup(func() { c.Close() })
	return c
}

// warm returns a client that has its connection already, and a counter of 1.
func (p *proxied) warm() *redis.Client {
	p.t.Helper()
	c := p.client()
	if err := incr(c); err != nil {
		p.t.Fatal(err)
	}
	return c
}

func (p *proxied) do(fault string, pick float64) {
	p.t.Helper()
	t, ok := troubleOf(step{fault: fault, pick: pick})
	if !ok {
		p.t.Fatalf("%s is no trouble of a network", fault)
	}
	if err := p.set(t); err != nil {
		p.t.Fatal(err)
	}
}

func (p *proxied) heal() {
	p.t.Helper()
	if err := p.set(trouble{}); err != nil {
		p.t.Fatal(err)
	}
}

// wantCount waits until n commands have reached the server.
func (p *proxied) wantCount(n int64) {
	p.t.Helper()
	var got int64
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if got, _ = p.server.client.Get(p.t.Context(), "n").Int64(); got == n {
			return
		}
	}
	p.t.Fatalf("%d commands reached the server, want %d", got, n)
}

func incr(c *redis.Client) error { return c.Incr(context.Background(), "n").Err() }

func wantTimeout(t *testing.T, err error) {
	t.Helper()
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("%v, want a timeout", err)
	}
}

// TestServerIsOurs wants no server that somebody else has started at the address.
func TestServerIsOurs(t *testing.T) {
	t.Parallel()
	stranger := testServer(t)
	s := &server{program: stranger.program, dir: t.TempDir(), addr: stranger.addr, client: stranger.client}
	if err := s.up(t.Context()); err == nil || s.process != nil {
		t.Errorf("%v, though another server answers there", err)
	}
	if err := stranger.client.Ping(t.Context()).Err(); err != nil {
		t.Error("the other server:", err)
	}
}

// TestProxy wants each fault to be what it is called, with a real client and server.
func TestProxy(t *testing.T) {
	for name, test := range map[string]func(*testing.T, *proxied){
		"requests lost": func(t *testing.T, p *proxied) {
			c := p.warm()
			p.do(faultHangUp, 0)
			wantTimeout(t, incr(c))
			p.heal()
			if err := incr(c); err != nil { // on a new connection, and after the lost one, had it arrived
				t.Error(err)
			}
			p.wantCount(2)
		},
		"replies lost": func(t *testing.T, p *proxied) {
			c := p.warm()
			p.do(faultHangDown, 0)
			wantTimeout(t, incr(c))
			p.wantCount(2)
		},
		"hang": func(t *testing.T, p *proxied) {
			c := p.warm()
			p.do(faultHang, 0)
			wantTimeout(t, incr(c))
			if n := p.server.client.Get(t.Context(), "n").Val(); n != "1" {
				t.Errorf("%s commands came through", n)
			}
			p.heal()
			p.wantCount(2) // it arrives late, when nobody waits for it any more
		},
		"reset before the request": func(t *testing.T, p *proxied) {
			p.do(faultResetUp, 0)
			wantReset(t, p)
		},
		"reset after the request": func(t *testing.T, p *proxied) {
			c := p.warm()
			p.do(faultResetDown, 0)
			if err := incr(c); err == nil {
				t.Error("an answer came")
			}
			p.wantCount(2)
			wantReset(t, p)
		},
		"refuse": func(t *testing.T, p *proxied) {
			conn := p.connection()
			p.do(faultRefuse, 0)
			wantClosed(t, conn)
			if err := incr(p.client()); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%v, want a refusal", err)
			}
		},
		"latency": func(t *testing.T, p *proxied) {
			c := p.warm()
			p.do(faultLatency, 0.4) // 100 ms each way
			if began := time.Now(); incr(c) != nil || time.Since(began) < 200*time.Millisecond {
				t.Errorf("took %v", time.Since(began))
			}
		},
		"throttle": func(t *testing.T, p *proxied) {
			c := p.warm()
			p.do(faultThrottle, 0) // 1 kB/s
			value := make([]byte, 160)
			if began := time.Now(); c.Set(t.Context(), "k", value, 0).Err() != nil || time.Since(began) < 160*time.Millisecond {
				t.Errorf("took %v", time.Since(began))
			}
		},
		"cut": func(t *testing.T, p *proxied) {
			conn := p.connection()
			if err := p.cut(); err != nil {
				t.Fatal(err)
			}
			wantClosed(t, conn)
			if err := incr(p.client()); err != nil {
				t.Errorf("a new connection: %v", err)
			}
		},
		"retarget": func(t *testing.T, p *proxied) {
			conn, other := p.connection(), testServer(t)
			if err := p.retarget(other.addr); err != nil {
				t.Fatal(err)
			}
			wantClosed(t, conn)
			if err := incr(p.client()); err != nil || other.client.Get(t.Context(), "n").Val() != "1" {
				t.Errorf("the other server: %v", err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newProxied(t)
			test(t, p)
			p.heal()
			if err := incr(p.client()); err != nil {
				t.Errorf("healed, and yet: %v", err)
			}
		})
	}
}

// connection returns one that has been used.
func (p *proxied) connection() net.Conn {
	p.t.Helper()
	conn := p.dial()
	if _, err := conn.Read(make([]byte, 100)); err != nil {
		p.t.Fatal(err)
	}
	return conn
}

// dial returns a connection on which a command is under way.
func (p *proxied) dial() net.Conn {
	p.t.Helper()
	conn, err := net.Dial("tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		p.t.Fatal(err)
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		p.t.Fatal(err)
	}
	return conn
}

func wantClosed(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := conn.Read(make([]byte, 100)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want a closed connection", err)
	}
}

func wantReset(t *testing.T, p *proxied) {
	t.Helper()
	if _, err := p.dial().Read(make([]byte, 100)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
}
