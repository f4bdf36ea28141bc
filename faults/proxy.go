package main

import (
	"bytes"
	"net"
	"strconv"
	"sync"
	"time"
)

// proxy is a TCP proxy in front of a Redis server, to take one worker's network apart with. It knows the protocol well
// enough to tell acquire, extend and release apart. Its methods are safe for concurrent use.
type proxy struct {
	addr     string
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu       sync.Mutex
	links    map[*link]struct{}
	trouble  trouble
	changed  chan struct{} // closed, and made anew, when the trouble changes
	swallows map[verb][]bool
	swallowN int // replies swallowed so far
}

// trouble is what a proxy does to its bytes. The zero value is none.
type trouble struct {
	refuse  bool          // close new connections at once
	hangUp  bool          // nothing gets from client to server, and nobody is told
	hangDn  bool          // the other way
	delay   time.Duration // each piece of data, each way
	perByte time.Duration // throttling, each way
}

// verb is what a command does to a lock.
type verb string

const (
	verbOther   verb = ""
	verbAcquire verb = "acquire"
	verbExtend  verb = "extend"
	verbRelease verb = "release" // also the one that leaves a marker
)

// link is one connection through a proxy.
type link struct {
	client, server net.Conn
	close          func()
	closed         chan struct{}
	pending        []byte // of a command that has not arrived in full
	swallow        bool   // the next reply is not passed on, guarded by the proxy's mutex
	silent         bool   // and the connection stays open
}

func newProxy(target string) (*proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{
		addr:     listener.Addr().String(),
		listener: listener,
		target:   target,
		links:    make(map[*link]struct{}),
		changed:  make(chan struct{}),
		swallows: make(map[verb][]bool),
	}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *proxy) close() {
	p.listener.Close()
	p.set(trouble{refuse: true})
	p.cut()
	p.wg.Wait()
}

// set makes t the trouble of all connections from now on. What hung before flows again if t lets it.
func (p *proxy) set(t trouble) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trouble = t
	close(p.changed)
	p.changed = make(chan struct{})
}

// cut closes every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.close()
	}
}

// swallow keeps back the reply to the next command of this kind, after Redis has done what it says. The client sees its
// connection closed or, if silent, nothing at all.
func (p *proxy) swallow(v verb, silent bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.swallows[v]) < 3 { // a worker without such commands must not save them up
		p.swallows[v] = append(p.swallows[v], silent)
	}
}

func (p *proxy) swallowed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.swallowN
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
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
	l := &link{client: client, server: server, closed: make(chan struct{})}
	l.close = sync.OnceFunc(func() {
		close(l.closed)
		client.Close()
		server.Close()
	})
	defer l.close()

	p.mu.Lock()
	if p.trouble.refuse {
		p.mu.Unlock()
		return
	}
	p.links[l] = struct{}{}
	p.mu.Unlock()

	p.wg.Go(func() { p.pump(l, server, client, true) })
	p.pump(l, client, server, false)

	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// pump copies from src to dst until either ends.
func (p *proxy) pump(l *link, dst, src net.Conn, up bool) {
	defer l.close()
	data := make([]byte, 16<<10)
	for {
		n, err := src.Read(data)
		if err != nil {
			return
		}
		if !p.wait(l, n, up) {
			return
		}
		if up {
			p.request(l, data[:n])
		} else if p.keepReply(l) {
			continue
		}
		if _, err := dst.Write(data[:n]); err != nil {
			return
		}
	}
}

// wait holds n bytes back as the trouble of the moment wants it. It returns false when the connection has ended meanwhile.
func (p *proxy) wait(l *link, n int, up bool) bool {
	for {
		p.mu.Lock()
		t, changed := p.trouble, p.changed
		p.mu.Unlock()
		if up && t.hangUp || !up && t.hangDn {
			select {
			case <-changed:
				continue
			case <-l.closed:
				return false
			}
		}
		d := t.delay + time.Duration(n)*t.perByte
		if d == 0 {
			return true
		}
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
			return true
		case <-l.closed:
			return false
		}
	}
}

// request looks for a command whose reply is to be swallowed. go-redis sends a command only after the reply to the one
// before, so the next reply is this command's.
func (p *proxy) request(l *link, data []byte) {
	l.pending = append(l.pending, data...)
	for {
		args, rest, ok := parseCommand(l.pending)
		if !ok {
			return
		}
		l.pending = rest
		v := verbOf(args)
		p.mu.Lock()
		if s := p.swallows[v]; v != verbOther && len(s) > 0 {
			l.swallow, l.silent = true, s[0]
			p.swallows[v] = s[1:]
		}
		p.mu.Unlock()
	}
}

// keepReply reports whether the reply that has come must not be passed on.
func (p *proxy) keepReply(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !l.swallow {
		return false
	}
	p.swallowN++
	if !l.silent {
		l.close()
	}
	return true // a silent connection stays silent: whatever came next would be taken for this reply
}

// parseCommand cuts the first whole command off data. Data that is no command is passed over.
func parseCommand(data []byte) (args [][]byte, rest []byte, ok bool) {
	count, rest, ok := parseNumber(data, '*')
	if !ok {
		return nil, nil, false
	}
	for range count {
		size, after, ok := parseNumber(rest, '$')
		if !ok || len(after) < size+2 {
			return nil, nil, false
		}
		args = append(args, after[:size])
		rest = after[size+2:]
	}
	return args, rest, true
}

func parseNumber(data []byte, mark byte) (n int, rest []byte, ok bool) {
	line, rest, ok := bytes.Cut(data, []byte("\r\n"))
	if !ok || len(line) < 2 || line[0] != mark {
		return 0, nil, false
	}
	n, err := strconv.Atoi(string(line[1:]))
	return n, rest, err == nil && n >= 0
}

// verbOf tells the commands of a lock apart by their shape: SET … NX, and the scripts by what they are given.
func verbOf(args [][]byte) verb {
	if len(args) == 0 {
		return verbOther
	}
	switch name := string(bytes.ToLower(args[0])); {
	case name == "set" && len(args) > 3 && bytes.EqualFold(args[3], []byte("nx")):
		return verbAcquire
	case name != "evalsha" && name != "eval":
		return verbOther
	case len(args) == 5 || len(args) == 7: // script 1 key value, or script 1 key value marker lifetime
		return verbRelease
	case len(args) == 6: // script 1 key value ttl
		return verbExtend
	}
	return verbOther
}
