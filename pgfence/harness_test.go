package pgfence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"example.com/redislock"
	"example.com/redislock/internal/postgres"
)

// shared is the server of the tests that do not harm it. Each has a database of its own there.
var shared struct {
	sync.Mutex
	server *postgres.Server
	err    error
	last   atomic.Int64
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// skipOr ends a test that has no server, in one line.
func skipOr(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, postgres.ErrNotInstalled) && os.Getenv("REDISLOCK_REQUIRE_SERVERS") == "" {
		t.Skip("skipped: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// database makes a database with our tables on the shared server, and returns its URL.
func database(t *testing.T) string {
	t.Helper()
	url := emptyDatabase(t)
	migrate(t, connect(t, url))
	return url
}

// emptyDatabase makes one without them.
func emptyDatabase(t *testing.T) string {
	t.Helper()
	shared.Lock()
	if shared.server == nil && shared.err == nil {
		shared.server, shared.err = postgres.Start("max_connections=300")
	}
	server, err := shared.server, shared.err
	shared.Unlock()
	skipOr(t, err)
	admin := connect(t, server.URL("postgres"))
	name := fmt.Sprintf("test%d", shared.last.Add(1))
	if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	admin.Close()
	return server.URL(name)
}

func migrate(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if err := Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

// connect makes a pool that is closed with the test.
func connect(t *testing.T, url string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 10
	for _, f := range change {
		f(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for end := time.Now().Add(20 * time.Second); pool.Stat().AcquiredConns() > 0; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) { // Close would wait for ever
				t.Errorf("%d connections never came back to the pool", pool.Stat().AcquiredConns())
				return
			}
		}
		pool.Close()
	})
	return pool
}

// ownServer is a server for a test that breaks it.
func ownServer(t *testing.T, options ...string) *postgres.Server {
	t.Helper()
	server, err := postgres.Start(options...)
	skipOr(t, err)
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

// eventually waits until what is said comes true.
func eventually(t *testing.T, what string, is func(context.Context) bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(t.Context()); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never came true: %s", what)
		}
	}
}

// books collects the events of Lockers.
type books struct {
	mu     sync.Mutex
	events []redislock.Event
}

func (b *books) observe(_ context.Context, e redislock.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.events = append(b.events, e)
}

// of returns the events of some kinds, in the order in which they happened.
func (b *books) of(kinds ...redislock.EventKind) []redislock.Event {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found []redislock.Event
	for _, e := range b.events {
		if slices.Contains(kinds, e.Kind) {
			found = append(found, e)
		}
	}
	return found
}

// String lists the kinds and how often each was seen.
func (b *books) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	counts := map[string]int{}
	for _, e := range b.events {
		counts[string(e.Kind)]++
	}
	var parts []string
	for kind, n := range counts {
		parts = append(parts, fmt.Sprintf("%s=%d", kind, n))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// want fails the test unless the books say just this, in the words of String.
func (b *books) want(t *testing.T, counts string) {
	t.Helper()
	if got := b.String(); got != counts {
		t.Errorf("the books say %q, want %q", got, counts)
	}
}

// locker returns a Locker that reports to b. At the end of the test it is shut down, and then each lock has ended once.
func locker(t *testing.T, pool *pgxpool.Pool, b *books, opts ...redislock.Option) *redislock.Locker {
	t.Helper()
	own := &books{}
	l, err := New(pool, redislock.WithLogger(slog.New(slog.DiscardHandler)), redislock.WithObserver(b.observe), redislock.WithObserver(own.observe),
		redislock.Options(opts...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := l.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		begun := len(own.of(redislock.EventAcquired))
		if ended := len(own.of(redislock.EventReleased, redislock.EventLost, redislock.EventAbandoned)); begun != ended {
			t.Errorf("%d locks acquired, %d ended: %s", begun, ended, own)
		}
	})
	return l
}

// proxy is a network between a pool and its server, to be taken apart.
type proxy struct {
	addr, target string
	wg           sync.WaitGroup

	mu      sync.Mutex
	links   map[net.Conn]struct{} // both ends of each
	flowing chan struct{}         // closed while bytes are let through
	ended   chan struct{}
}

// newProxy starts a proxy in front of the server at url, which ends with the test.
func newProxy(t *testing.T, url string) *proxy {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{
		addr: listener.Addr().String(), target: net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port))),
		links: map[net.Conn]struct{}{}, flowing: make(chan struct{}), ended: make(chan struct{}),
	}
	close(p.flowing)
	p.wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.serve(client)
		}
	})
	t.Cleanup(func() {
		close(p.ended)
		listener.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

// through makes a pool dial the proxy.
func (p *proxy) through(c *pgxpool.Config) {
	c.ConnConfig.DialFunc = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, p.addr)
	}
}

func (p *proxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		client.Close()
		return
	}
	p.mu.Lock()
	p.links[client], p.links[server] = struct{}{}, struct{}{}
	p.mu.Unlock()
	p.wg.Go(func() { p.pump(client, server) })
	p.wg.Go(func() { p.pump(server, client) })
}

func (p *proxy) pump(from, to net.Conn) {
	defer to.Close()
	buffer := make([]byte, 4096)
	for {
		n, err := from.Read(buffer)
		p.mu.Lock()
		flowing := p.flowing
		p.mu.Unlock()
		select {
		case <-flowing:
		case <-p.ended:
			return
		}
		if _, failed := to.Write(buffer[:n]); err != nil || failed != nil {
			return
		}
	}
}

// cut closes every connection. New ones work.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.links {
		conn.Close()
	}
	clear(p.links)
}

// hang passes nothing on until restore, not even that a connection was closed, as a network does that drops packets.
func (p *proxy) hang() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flowing = make(chan struct{})
}

// restore ends hang. What was held back arrives now.
func (p *proxy) restore() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.flowing:
	default:
		close(p.flowing)
	}
}
