package main

import (
	"bytes"
	"net"
	"strconv"
	"sync"
	"time"
)

// hop passes everything on between a worker's proxy and a Redis server, except for the replies it is told to swallow. It knows
// the protocol well enough to tell acquire, extend and release apart, which toxiproxy does not. Its methods are safe for
// concurrent use.
type hop struct {
	addr      string
	swallowed func(v verb, silent bool) // is told of each reply that is kept back
	listener  net.Listener
	wg        sync.WaitGroup

	mu       sync.Mutex
	target   string
	links    map[*link]struct{} // nil once closed
	swallows map[verb][]bool
}

// verb is what a command does to a lock.
type verb string

const (
	verbOther   verb = ""
	verbAcquire verb = "acquire"
	verbExtend  verb = "extend"
	verbRelease verb = "release" // also the one that leaves a marker
)

// link is one connection through a hop.
type link struct {
	client, server net.Conn
	pending        []byte // of a command that has not arrived in full
	swallow        verb   // of the command whose reply is not passed on, guarded by the hop's mutex
	silent         bool   // and the connection stays open
	kept           bool   // that reply has come
}

func (l *link) close() {
	l.client.Close()
	l.server.Close()
}

func newHop(target string, swallowed func(v verb, silent bool)) (*hop, error) {
	h := &hop{target: target, swallowed: swallowed, links: make(map[*link]struct{}), swallows: make(map[verb][]bool)}
	var err error
	if h.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	h.addr = h.listener.Addr().String()
	h.wg.Go(h.accept)
	return h, nil
}

func (h *hop) close() {
	h.listener.Close()
	h.mu.Lock()
	for l := range h.links {
		l.close()
	}
	h.links = nil
	h.mu.Unlock()
	h.wg.Wait()
}

// retarget leads all connections to another server from now on, and closes those that are there.
func (h *hop) retarget(target string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.target = target
	for l := range h.links {
		l.close()
	}
}

// swallow keeps back the reply to the next command of this kind, after Redis has done what it says. The client sees its
// connection closed or, if silent, nothing at all.
func (h *hop) swallow(v verb, silent bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.swallows[v]) < 3 { // a worker without such commands must not save them up
		h.swallows[v] = append(h.swallows[v], silent)
	}
}

func (h *hop) accept() {
	for {
		client, err := h.listener.Accept()
		if err != nil {
			return // closed
		}
		h.wg.Go(func() { h.serve(client) })
	}
}

func (h *hop) serve(client net.Conn) {
	defer client.Close()
	h.mu.Lock()
	target := h.target
	h.mu.Unlock()
	server, err := net.DialTimeout("tcp", target, time.Second)
	if err != nil {
		return
	}
	l := &link{client: client, server: server}
	defer l.close()
	h.mu.Lock()
	if h.links == nil || target != h.target {
		h.mu.Unlock()
		return
	}
	h.links[l] = struct{}{}
	h.mu.Unlock()

	h.wg.Go(func() { h.pump(l, server, client, true) })
	h.pump(l, client, server, false)

	h.mu.Lock()
	delete(h.links, l)
	h.mu.Unlock()
}

// pump copies from src to dst until either ends.
func (h *hop) pump(l *link, dst, src net.Conn, requests bool) {
	defer l.close()
	data := make([]byte, 16<<10)
	for {
		n, err := src.Read(data)
		if err != nil {
			return
		}
		if requests {
			h.request(l, data[:n])
		} else if h.keepReply(l) {
			continue
		}
		if _, err := dst.Write(data[:n]); err != nil {
			return
		}
	}
}

// request looks for a command whose reply is to be swallowed. go-redis sends a command only after the reply to the one
// before, so the next reply is this command's.
func (h *hop) request(l *link, data []byte) {
	l.pending = append(l.pending, data...)
	for {
		args, rest, ok := parseCommand(l.pending)
		if !ok {
			return
		}
		l.pending = rest
		v := verbOf(args)
		h.mu.Lock()
		if s := h.swallows[v]; v != verbOther && l.swallow == verbOther && len(s) > 0 {
			l.swallow, l.silent = v, s[0]
			h.swallows[v] = s[1:]
		}
		h.mu.Unlock()
	}
}

// keepReply reports whether the reply that has come must not be passed on.
func (h *hop) keepReply(l *link) bool {
	h.mu.Lock()
	v, silent, first := l.swallow, l.silent, !l.kept
	l.kept = v != verbOther
	h.mu.Unlock()
	if v == verbOther {
		return false
	}
	if first {
		h.swallowed(v, silent)
	}
	if !silent {
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
	case len(args) == 8: // script 2 key counter value ttl lifetime
		return verbAcquire
	}
	return verbOther
}
