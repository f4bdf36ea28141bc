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
	"strings"
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

// failed says how the process ended, if neither in order nor by the signal s.
func (p *process) failed(s syscall.Signal) error {
	state := p.cmd.ProcessState
	if status, ok := state.Sys().(syscall.WaitStatus); state.Success() || ok && status.Signaled() && status.Signal() == s {
		return nil
	}
	return errors.New(state.String())
}

// server is a Redis server of our own on a loopback port. It keeps its address when it is started again.
type server struct {
	program string
	dir     string
	addr    string
	args    []string
	client  *redis.Client // straight to it
	process *process
}

func startServer(ctx context.Context, program, dir string, args ...string) (*server, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	s := &server{program: program, dir: dir, args: args}
	err := atFreePort(func(addr string) error {
		s.addr, s.client = addr, redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
		err := s.up(ctx)
		if err != nil {
			s.client.Close()
		}
		return err
	})
	return s, err
}

// up starts the process and waits until it answers: it, and no stranger who has its port.
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
		if err = s.answers(ctx, p.cmd.Process.Pid); err == nil {
			s.process = p
			return nil
		}
		if p.waitFor(20*time.Millisecond) || ctx.Err() != nil || time.Now().After(deadline) {
			p.kill()
			return fmt.Errorf("start %s on %s: %w\n%s", s.program, s.addr, err, p.output.String())
		}
	}
}

// answers asks whether the process is ready, and is the one that answers at the address.
func (s *server) answers(ctx context.Context, pid int) error {
	if err := s.client.Ping(ctx).Err(); err != nil { // INFO answers while data is still being loaded
		return err
	}
	info, err := s.client.Info(ctx, "server").Result()
	if err == nil && !strings.Contains(info, fmt.Sprintf("\nprocess_id:%d\r\n", pid)) {
		err = errors.New("another process answers there")
	}
	return err
}

// replicaOf makes the server the replica of another one of ours, or of none.
func (s *server) replicaOf(ctx context.Context, of *server) error {
	host, port := "no", "one"
	if of != nil {
		var err error
		if host, port, err = net.SplitHostPort(of.addr); err != nil {
			return err
		}
	}
	if err := s.client.Do(ctx, "replicaof", host, port).Err(); err != nil {
		return fmt.Errorf("replicaof %s %s: %w", host, port, err)
	}
	return nil
}

// version returns the server's name and version.
func (s *server) version(ctx context.Context) (string, error) {
	info, err := s.client.Info(ctx, "server").Result()
	if err != nil {
		return "", err
	}
	for _, name := range []string{"valkey", "redis"} { // Valkey says both
		if _, after, ok := strings.Cut(info, "\n"+name+"_version:"); ok {
			version, _, _ := strings.Cut(after, "\r")
			return name + " " + version, nil
		}
	}
	return "", errors.New("the server does not tell its version")
}

// stop ends the server for good.
func (s *server) stop() {
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
