//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"example.com/redislock/internal/postgres"
	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// servers are those that a run needs.
type servers struct {
	postgres             *postgres.Server
	redisName, redisAddr string
	endRedis             func() error
}

func (s *servers) start(ctx context.Context) (err error) {
	s.postgres, err = postgres.Start()
	if errors.Is(err, postgres.ErrNotInstalled) {
		return fmt.Errorf("needs the programs of PostgreSQL (tested with 15): %w", err)
	}
	if err != nil {
		return err
	}
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return s.embedRedis()
	}
	for range 3 { // another process may take the port meanwhile
		if err = s.startRedis(ctx, program); err == nil {
			return nil
		}
	}
	return err
}

func (s *servers) stop() error {
	var errs []error
	if s.endRedis != nil {
		errs = append(errs, s.endRedis())
	}
	if s.postgres != nil {
		errs = append(errs, s.postgres.Stop())
	}
	return errors.Join(errs...)
}

// embedRedis starts a Redis within this process.
func (s *servers) embedRedis() error {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true) // it is made for tests, where time stands still: without this no lock would ever expire
	if err := m.Start(); err != nil {
		return err
	}
	s.redisName, s.redisAddr = "embedded Redis at "+m.Addr(), m.Addr()
	s.endRedis = func() error { m.Close(); return nil }
	return nil
}

// startRedis starts a redis-server and waits until it answers.
func (s *servers) startRedis(ctx context.Context, program string) error {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	addr := free.Addr().(*net.TCPAddr)
	free.Close()
	dir, err := os.MkdirTemp("", "redis-")
	if err != nil {
		return err
	}
	cmd := exec.Command(program, "--bind", "127.0.0.1", "--port", fmt.Sprint(addr.Port), "--save", "", "--dir", dir)
	cmd.SysProcAttr = apart()
	if err := cmd.Start(); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	ctx, exited := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		exited(fmt.Errorf("redis-server has ended: %v", cmd.Wait()))
		close(done)
	}()
	end := func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-done
		return os.RemoveAll(dir)
	}
	rdb := redis.NewClient(&redis.Options{Addr: addr.String()})
	defer rdb.Close()
	for rdb.Ping(ctx).Err() != nil {
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), end())
		case <-time.After(10 * time.Millisecond):
		}
	}
	s.redisName, s.redisAddr, s.endRedis = "redis-server at "+addr.String(), addr.String(), end
	return nil
}

// apart is for a process that is ended by this one: Ctrl-C must not end it first, nor the end of this one leave it behind.
func apart() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(attr)
	return attr
}

// dieWithParent is set where the system has a way.
var dieWithParent = func(*syscall.SysProcAttr) {}
