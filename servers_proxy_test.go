package redislock

import (
	"bytes"
	"net"
	"sync"
	"testing"
	"time"
)

// proxy is a TCP proxy in front of a server, to take the network apart with. Its methods may be called at any time and
// from any goroutine.
type proxy struct {
	addr   string
	target string
	wg     sync.WaitGroup

	mu        sync.Mutex
	links     map[*proxied]struct{}
	refusing  bool
	flowing   chan struct{} // closed while bytes are let through
	match     []byte        // what swallow waits for
	swallowed chan struct{}
}

// proxied is one connection through a proxy.
type proxied struct {
	client, server net.Conn
	close          func()
	closed         chan struct{}
	swallow        chan struct{} // if not nil: keep the next reply, close the link, then this
}

// newProxy starts a proxy that passes everything on to target, an address, and ends with the test.
func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{
		addr:    listener.Addr().String(),
		target:  target,
		links:   make(map[*proxied]struct{}),
		flowing: make(chan struct{}),
	}
	close(p.flowing)
	p.wg.Go(func() { p.accept(listener) })
	t.Cleanup(func() {
		listener.Close()
		p.refuse()
		p.wg.Wait()
	})
	return p
}

// cut closes every connection. New ones work.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.close()
	}
}

// refuse closes every connection, and until restore each new one as soon as it is made.
func (p *proxy) refuse() {
	p.mu.Lock()
	p.refusing = true
	p.mu.Unlock()
	p.cut()
}

// hang passes nothing on until restore, in either direction, and leaves every connection open, as a network does that
// drops packets. New connections can be made and hang too.
func (p *proxy) hang() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.flowing) {
		p.flowing = make(chan struct{})
	}
}

// restore ends refuse and hang. What hang held back arrives now, unless its connection is closed.
func (p *proxy) restore() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = false
	if !isClosed(p.flowing) {
		close(p.flowing)
	}
}

// swallow lets the next command that contains text pass, keeps back the reply, and closes the connection; the returned
// channel is closed when that is done. Upper and lower case are the same. Choose text that only the command meant has,
// such as its key: "set" is in go-redis's greeting as well.
func (p *proxy) swallow(text string) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.match = bytes.ToLower([]byte(text))
	p.swallowed = make(chan struct{})
	return p.swallowed
}

func (p *proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return // closed at the test's end
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.DialTimeout("tcp", p.target, time.Second)
	if err != nil {
		return
	}
	l := &proxied{client: client, server: server, closed: make(chan struct{})}
	l.close = sync.OnceFunc(func() {
		close(l.closed)
		client.Close()
		server.Close()
	})
	defer l.close()

	p.mu.Lock()
	if p.refusing {
		p.mu.Unlock()
		return
	}
	p.links[l] = struct{}{}
	p.mu.Unlock()

	p.wg.Go(func() { p.pump(l, l.server, l.client, p.request) })
	p.pump(l, l.client, l.server, p.reply)

	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// pump copies from src to dst until either ends or pass says no.
func (p *proxy) pump(l *proxied, dst, src net.Conn, pass func(l *proxied, data []byte) bool) {
	defer l.close()
	data := make([]byte, 64<<10) // holds any command or reply of these tests in one piece
	for {
		n, err := src.Read(data)
		if err != nil {
			return
		}
		p.mu.Lock()
		flowing := p.flowing
		p.mu.Unlock()
		select {
		case <-flowing:
		case <-l.closed:
			return
		}
		if !pass(l, data[:n]) {
			return
		}
		if _, err := dst.Write(data[:n]); err != nil {
			return
		}
	}
}

// request marks the link for its reply to be swallowed. go-redis sends a command only after the reply to the one before,
// so the next reply is this command's.
func (p *proxy) request(l *proxied, data []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.match != nil && bytes.Contains(bytes.ToLower(data), p.match) {
		l.swallow, p.match = p.swallowed, nil
	}
	return true
}

func (p *proxy) reply(l *proxied, _ []byte) bool {
	p.mu.Lock()
	swallow := l.swallow
	p.mu.Unlock()
	if swallow == nil {
		return true
	}
	l.close()
	close(swallow)
	return false
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
