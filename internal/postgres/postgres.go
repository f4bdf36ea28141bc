//go:build unix

// Package postgres starts PostgreSQL servers on loopback ports, for tests and examples.
package postgres

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// ErrNotInstalled says that there are no programs of PostgreSQL on this machine.
var ErrNotInstalled = errors.New("postgres: not installed: no initdb beside pg_isready, neither in /usr/lib/postgresql/*/bin nor in PATH")

// Server is a PostgreSQL server with a database and user named postgres, without a password, and without care for a crash of the
// whole machine. It keeps its port and its data when it is started again. It is for one goroutine at a time.
type Server struct {
	bin, dir string
	port     string
	options  []string
	as       *syscall.Credential
	cmd      *exec.Cmd
	exited   chan struct{}
	log      bytes.Buffer // readable once exited is closed
}

const patience = 30 * time.Second

// Start makes a server in a new directory and waits until it answers. options are settings such as "max_connections=20". It
// fails with ErrNotInstalled where the programs are missing.
func Start(options ...string) (*Server, error) {
	bin, err := programs()
	if err != nil {
		return nil, err
	}
	s := &Server{bin: bin, options: options}
	if s.as, err = unprivileged(); err != nil {
		return nil, err
	}
	if s.dir, err = os.MkdirTemp("", "postgres-"); err != nil {
		return nil, err
	}
	if err := s.initialize(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(s.dir))
	}
	for range 3 { // another process may take the port meanwhile
		if s.port, err = freePort(); err != nil {
			break
		}
		if err = s.run(); err == nil {
			return s, nil
		}
	}
	return nil, errors.Join(err, os.RemoveAll(s.dir))
}

// programs returns the directory of the newest installed version.
func programs() (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/pg_isready") // Debian keeps them out of PATH
	if path, err := exec.LookPath("pg_isready"); err == nil && len(found) == 0 {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			found = []string{path}
		}
	}
	found = slices.DeleteFunc(found, func(path string) bool {
		_, err := os.Stat(filepath.Join(filepath.Dir(path), "initdb"))
		return err != nil // only the programs for clients
	})
	if len(found) == 0 {
		return "", ErrNotInstalled
	}
	version := func(path string) int {
		n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
		return n
	}
	return filepath.Dir(slices.MaxFunc(found, func(a, b string) int { return version(a) - version(b) })), nil
}

// unprivileged returns whom the server runs as, nil for this user: PostgreSQL refuses to run as root.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	var u *user.User
	var err error
	for _, name := range []string{"postgres", "nobody"} {
		if u, err = user.Lookup(name); err == nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

func (s *Server) initialize() error {
	if s.as != nil {
		if err := os.Chown(s.dir, int(s.as.Uid), int(s.as.Gid)); err != nil {
			return err
		}
	}
	initdb := s.command("initdb", "-D", filepath.Join(s.dir, "data"), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("postgres: initdb: %w\n%s", err, out)
	}
	return nil
}

func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir = s.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.as, Setpgid: true} // Ctrl-C is for those who started it
	dieWithParent(cmd.SysProcAttr)
	return cmd
}

// dieWithParent is set where the system has a way.
var dieWithParent = func(*syscall.SysProcAttr) {}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

func (s *Server) run() error {
	args := []string{"-D", filepath.Join(s.dir, "data"), "-p", s.port, "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"}
	for _, option := range s.options {
		args = append(args, "-c", option)
	}
	s.log.Reset()
	cmd, exited := s.command("postgres", args...), make(chan struct{})
	cmd.Stdout, cmd.Stderr = &s.log, &s.log
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	s.cmd, s.exited = cmd, exited
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if s.command("pg_isready", "-q", "-h", "127.0.0.1", "-p", s.port, "-U", "postgres").Run() == nil && !s.ended() {
			return nil
		}
		select {
		case <-exited:
			return fmt.Errorf("postgres: it ended at once:\n%s", s.log.String())
		case <-time.After(50 * time.Millisecond):
		}
	}
	s.end(syscall.SIGQUIT)
	return fmt.Errorf("postgres: no answer within %v:\n%s", patience, s.log.String())
}

func (s *Server) ended() bool {
	select {
	case <-s.exited:
		return true
	default:
		return false
	}
}

// end ends the server with a signal, and with force if that is not enough.
func (s *Server) end(signal syscall.Signal) {
	_ = s.cmd.Process.Signal(signal)
	select {
	case <-s.exited:
	case <-time.After(patience):
		_ = s.cmd.Process.Kill()
		<-s.exited
	}
}

// URL is where clients find a database of the server.
func (s *Server) URL(database string) string {
	return "postgres://postgres@" + s.Addr() + "/" + database + "?sslmode=disable"
}

// Addr is the server's host and port.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", s.port) }

// Crash ends the server without giving it time to end its sessions.
func (s *Server) Crash() { s.end(syscall.SIGQUIT) }

// Restart starts a server that has crashed, or one that is running after it has ended its sessions.
func (s *Server) Restart() error {
	if !s.ended() {
		s.end(syscall.SIGINT)
	}
	return s.run()
}

// Stop ends the server and removes its data.
func (s *Server) Stop() error {
	if !s.ended() {
		s.end(syscall.SIGINT)
	}
	return os.RemoveAll(s.dir)
}
