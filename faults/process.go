package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// process is a child that ends with this program, even if that is killed.
type process struct {
	cmd    *exec.Cmd
	output bytes.Buffer // readable once exited is closed
	exited chan struct{}
}

func start(dir string, env []string, name string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(name, args...), exited: make(chan struct{})}
	p.cmd.Dir, p.cmd.Env = dir, append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	// A group of its own, so that Ctrl-C reaches this program only, which ends its children in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its output or was our wish
		close(p.exited)
	}()
	return p, nil
}

// signal sends s. A process that has ended is no error.
func (p *process) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.exited
}

// waitFor reports whether the process ended within d.
func (p *process) waitFor(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
	}
	return p.ended()
}

func (p *process) ended() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// server is a Redis server of our own on a loopback port. It keeps its address when it is started again.
type server struct {
	program string
	dir     string
	addr    string
	args    []string
	client  *redis.Client // straight to it

	mu      sync.Mutex // held by what takes it down
	process *process
}

func startServer(ctx context.Context, program, dir string, args ...string) (*server, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	for range 5 { // the free port may be taken by somebody else before the server gets there
		s := &server{program: program, dir: dir, args: args}
		var listener net.Listener
		if listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return nil, err
		}
		s.addr = listener.Addr().String()
		listener.Close()
		s.client = redis.NewClient(&redis.Options{Addr: s.addr, MaxRetries: -1})
		if err = s.up(ctx); err == nil {
			return s, nil
		}
		s.client.Close()
	}
	return nil, err
}

// up starts the process and waits until it answers.
func (s *server) up(ctx context.Context) error {
	_, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		return err
	}
	args := append([]string{"--bind", "127.0.0.1", "--port", port, "--save", "", "--dir", s.dir}, s.args...)
	p, err := start(s.dir, nil, s.program, args...)
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(10 * time.Second); ; {
		if err = s.client.Ping(ctx).Err(); err == nil {
			s.process = p
			return nil
		}
		if p.waitFor(20*time.Millisecond) || ctx.Err() != nil || time.Now().After(deadline) {
			p.kill()
			return fmt.Errorf("start %s on %s: %w\n%s", s.program, s.addr, err, p.output.String())
		}
	}
}

// stop ends the server for good.
func (s *server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.process.kill()
	s.client.Close()
}

// findServer returns the server program to use.
func findServer(path string) (string, error) {
	if path == "" {
		path = "redis-server"
	}
	found, err := exec.LookPath(path)
	if err != nil {
		return "", errors.New("no redis-server: name one with -server")
	}
	return filepath.Abs(found)
}
