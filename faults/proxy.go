package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// proxy stands between one worker and a server, to take that worker's network apart with. One trouble at a time; retarget may be
// called at any time.
type proxy struct {
	addr string
	toxi *toxiproxy.Proxy
	hop  *hop // behind toxi; nil where no reply is to be swallowed
}

// trouble is what a proxy does to its connections. The zero value is none.
type trouble struct {
	refuse bool // no connection at all
	toxics []toxic
}

// toxic is one of toxiproxy's, which does the same to all connections in one direction: upstream, to the server, or downstream.
type toxic struct {
	Name       string           `json:"name"`
	Type       string           `json:"type"`
	Stream     string           `json:"stream"`
	Attributes map[string]int64 `json:"attributes"`
}

const (
	up   = "upstream"
	down = "downstream"
)

func toxicOf(direction, kind string, attributes map[string]int64) toxic {
	return toxic{kind + " " + direction, kind, direction, attributes}
}

func bothWays(kind string, attributes map[string]int64) []toxic {
	return []toxic{toxicOf(up, kind, attributes), toxicOf(down, kind, attributes)}
}

// toxiServer is what every toxiproxy.Proxy belongs to. It serves nothing, and says nothing.
var toxiServer = sync.OnceValue(func() *toxiproxy.ApiServer {
	zerolog.SetGlobalLevel(zerolog.Disabled) // one toxic has a logger of its own
	return toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
})

// newProxy starts a proxy in front of target, and unless swallowed is nil, one that can swallow replies and tells it of each.
func newProxy(target string, swallowed func(v verb, silent bool)) (*proxy, error) {
	p := &proxy{}
	if swallowed != nil {
		var err error
		if p.hop, err = newHop(target, swallowed); err != nil {
			return nil, err
		}
		target = p.hop.addr
	}
	err := atFreePort(func(addr string) error {
		p.addr, p.toxi = addr, toxiproxy.NewProxy(toxiServer(), addr, addr, target)
		return p.toxi.Start()
	})
	if err != nil {
		p.close()
		return nil, fmt.Errorf("start proxy: %w", err)
	}
	return p, nil
}

func (p *proxy) close() {
	p.toxi.Toxics.ResetToxics(context.Background()) // what it holds back would keep its goroutines
	p.toxi.Stop()
	if p.hop != nil {
		p.hop.close()
	}
}

// set makes t the trouble from now on, of the connections that are there as well. What a latency held back flows at once, what
// a timeout held back is gone, and its connections with it.
func (p *proxy) set(t trouble) error {
	healed := make(chan struct{})
	go func() {
		p.toxi.Toxics.ResetToxics(context.Background())
		close(healed)
	}()
	select {
	case <-healed:
	case <-time.After(30 * time.Second):
		return errors.New("toxiproxy does not let go of a connection")
	}
	if t.refuse {
		p.toxi.Stop()
		return nil
	}
	if err := p.start(); err != nil {
		return err
	}
	for _, tx := range t.toxics {
		text, err := json.Marshal(tx)
		if err != nil {
			return err
		}
		if _, err := p.toxi.Toxics.AddToxicJson(bytes.NewReader(text)); err != nil {
			return fmt.Errorf("add toxic %s: %w", tx.Name, err)
		}
	}
	return nil
}

// start lets connections come, if they don't already. A process that is being started elsewhere in this program has the listener
// until it becomes another program, and so its port.
func (p *proxy) start() (err error) {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err = p.toxi.Start(); err == nil || errors.Is(err, toxiproxy.ErrProxyAlreadyStarted) {
			return nil
		}
	}
	return fmt.Errorf("start proxy again: %w", err)
}

// cut closes every connection, and lets new ones come.
func (p *proxy) cut() error {
	p.toxi.Stop()
	return p.set(trouble{})
}

// retarget closes every connection, and leads new ones to another server.
func (p *proxy) retarget(target string) error {
	if p.hop != nil {
		p.hop.retarget(target)
		return nil
	}
	if p.toxi.Update(&toxiproxy.Proxy{Listen: p.addr, Upstream: target, Enabled: true}) == nil {
		return nil
	}
	return p.start() // it knows its target
}

// atFreePort tries start with addresses that should be free, below those that the system gives to outgoing connections: what
// goes down and up again must not find its port taken by one of them.
func atFreePort(start func(addr string) error) (err error) {
	const lowest = 10000
	highest := 32768
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if first, err := strconv.Atoi(string(bytes.Fields(text)[0])); err == nil && first > lowest {
			highest = first
		}
	}
	for range 5 {
		if err = start(net.JoinHostPort("127.0.0.1", strconv.Itoa(lowest+rand.IntN(highest-lowest)))); err == nil {
			return nil
		}
	}
	return err
}
