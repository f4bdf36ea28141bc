package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// server is a Redis server of our own on a loopback port, without persistence.
type server struct {
	addr    string
	version string
	cmd     *exec.Cmd
	dir     string
	output  bytes.Buffer // readable once exited is closed
	exited  chan struct{}
}

func startServer(program string) (*server, error) {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return nil, err
	}
	for range 3 { // another process may take the port meanwhile
		var s *server
		if s, err = startServerIn(dir, program); err == nil {
			return s, nil
		}
	}
	return nil, errors.Join(err, os.RemoveAll(dir))
}

func startServerIn(dir, program string) (*server, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	s := &server{addr: addr, dir: dir, exited: make(chan struct{})}
	s.cmd = exec.Command(program, "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", dir)
	s.cmd.Stdout, s.cmd.Stderr = &s.output, &s.output
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true} // Ctrl-C is for this program
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	defer rdb.Close()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		info, err := rdb.InfoMap(context.Background(), "server").Result()
		if err == nil {
			s.version = describe(info["Server"])
			return s, nil
		}
		select {
		case <-s.exited:
			return nil, fmt.Errorf("bench: %s ended:\n%s", program, s.output.String())
		default:
		}
	}
	s.kill()
	return nil, fmt.Errorf("bench: %s does not answer", program)
}

// describe names the server and its version: servers that are compatible say both.
func describe(info map[string]string) string {
	if name := info["server_name"]; name != "" && info[name+"_version"] != "" {
		return strings.ToUpper(name[:1]) + name[1:] + " " + info[name+"_version"]
	}
	return "Redis " + info["redis_version"]
}

func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	<-s.exited
}

func (s *server) stop() error {
	s.kill()
	return os.RemoveAll(s.dir)
}
