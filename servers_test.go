package redislock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// serverWait bounds every wait for a server of our own to start, stop or answer. It is far more than any needs.
const serverWait = 20 * time.Second

// dieWithParent makes a server end with the test binary where the system can do that, however that ends: a test that
// panics or runs out of time takes no Cleanup.
var dieWithParent *syscall.SysProcAttr

// addressInUse is what a server says before it ends because its port is taken.
const addressInUse = "Address already in use"

// serverNames are the programs to test with, oldest first.
var serverNames = []string{"redis-server", "redis-8.0", "valkey-8.1", "valkey-9"}

// serverPrograms finds the servers to test with: the system's own redis-server, and those .ci/servers.sh fetched.
func serverPrograms() (found map[string]string, missing []string) {
	dir := os.Getenv("REDISLOCK_SERVERS")
	if dir == "" {
		dir = ".servers"
	}
	found = make(map[string]string)
	for _, name := range serverNames {
		program := name
		if name != "redis-server" {
			program = filepath.Join(dir, name)
		}
		path, err := exec.LookPath(program)
		if err == nil {
			path, err = filepath.Abs(path) // servers run in a folder of their own
		}
		if err != nil {
			missing = append(missing, name)
			continue
		}
		found[name] = path
	}
	return found, missing
}

// eachProgram runs fn as a subtest for every server program found. A missing one is a skipped subtest, or a failure
// where REDISLOCK_REQUIRE_SERVERS is set.
func eachProgram(t *testing.T, fn func(t *testing.T, program string)) {
	t.Helper()
	const howTo = "get them with: apt-get install redis-server; .ci/servers.sh .servers"
	found, missing := serverPrograms()
	switch {
	case len(missing) > 0 && os.Getenv("REDISLOCK_REQUIRE_SERVERS") != "":
		t.Fatalf("REDISLOCK_REQUIRE_SERVERS is set and %s not found; %s", strings.Join(missing, ", "), howTo)
	case len(found) == 0:
		t.Skipf("skipped against real servers, none found; %s", howTo)
	}
	for _, name := range serverNames {
		t.Run(name, func(t *testing.T) {
			if slices.Contains(missing, name) {
				t.Skipf("skipped against %s, not found; %s", name, howTo)
			}
			fn(t, found[name])
		})
	}
}

// eachServer is eachProgram with a server of it running, fresh and empty.
func eachServer(t *testing.T, fn func(t *testing.T, s *server)) {
	t.Helper()
	eachProgram(t, func(t *testing.T, program string) { fn(t, startServer(t, program)) })
}

// server is a Redis or Valkey process of a test's own, on a loopback port, gone with the test. Its methods are for the
// test's own goroutine.
type server struct {
	program string
	addr    string
	t       testing.TB
	dir     string
	args    []string
	cmd     *exec.Cmd
	exited  chan struct{} // closed once cmd was waited for
}

// startServer starts program and returns when it answers. args are further settings as on its command line, such as
// "--appendonly", "yes", and win over those set here.
func startServer(t testing.TB, program string, args ...string) *server {
	t.Helper()
	s := &server{program: program, t: t, dir: t.TempDir()}
	t.Cleanup(s.stop)
	// Whether a port is free is only known once the server has it, so let it try, and try another one where it can't.
	// The ports are below those that outgoing connections get, and so is a cluster node's second one, 10000 above: they
	// stay free while the server is down between kill and restart.
	for {
		port := 20000 + rand.IntN(2700)
		s.addr = fmt.Sprintf("127.0.0.1:%d", port)
		s.args = append([]string{"--bind", "127.0.0.1", "--port", fmt.Sprint(port), "--save", "", "--appendonly", "no",
			"--daemonize", "no", "--always-show-logo", "no"}, args...)
		err := s.start()
		if err == nil {
			return s
		}
		if !strings.Contains(s.log(), addressInUse) {
			t.Fatalf("start %s: %v\n%s", program, err, s.log())
		}
		if err := os.Remove(s.logFile()); err != nil {
			t.Fatal(err)
		}
	}
}

// client returns a client of s that is closed with the test.
func (s *server) client(t testing.TB, opts ...func(*redis.Options)) *redis.Client {
	t.Helper()
	o := &redis.Options{Addr: s.addr}
	for _, opt := range opts {
		opt(o)
	}
	c := redis.NewClient(o)
	t.Cleanup(func() { c.Close() })
	return c
}

// kill ends the process as a crash would, and returns once it is gone.
func (s *server) kill() {
	s.t.Helper()
	s.signal(syscall.SIGKILL)
	<-s.exited
}

// restart starts the process again on the same port, killing it first if it runs. Without "--appendonly yes" it comes
// back empty.
func (s *server) restart() {
	s.t.Helper()
	s.kill()
	if err := s.start(); err != nil {
		s.t.Fatalf("restart %s: %v\n%s", s.program, err, s.log())
	}
}

// pause stops the process where it is: connections stay open, and nothing answers until resume.
func (s *server) pause() {
	s.t.Helper()
	s.signal(syscall.SIGSTOP)
	// The signal is delivered in the kernel's own time; a client must not get one more answer after pause.
	state := filepath.Join("/proc", fmt.Sprint(s.cmd.Process.Pid), "stat")
	for deadline := time.Now().Add(serverWait); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(state)
		if err != nil || bytes.Contains(stat, []byte(") T ")) { // no /proc, or stopped
			return
		}
	}
	s.t.Fatalf("%s did not pause", s.program)
}

// resume lets a paused process go on.
func (s *server) resume() {
	s.t.Helper()
	s.signal(syscall.SIGCONT)
}

// version is the server's own name and version, such as "Redis 7.0.15" or "Valkey 9.1.2".
func (s *server) version() string {
	s.t.Helper()
	out, err := exec.Command(s.program, "--version").Output()
	var name, version string
	if err == nil {
		_, err = fmt.Sscanf(string(out), "%s server v=%s", &name, &version)
	}
	if err != nil {
		s.t.Fatalf("%s --version: %v: %q", s.program, err, out)
	}
	return name + " " + version
}

// start runs the process and waits until it answers.
func (s *server) start() error {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(s.program, s.args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, log, log
	cmd.SysProcAttr = dieWithParent
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait() // how it ended is in its log
	}()
	s.cmd, s.exited = cmd, exited

	for deadline := time.Now().Add(serverWait); time.Now().Before(deadline); {
		select {
		case <-exited:
			return errors.New("it ended at once")
		case <-time.After(5 * time.Millisecond):
		}
		if s.answers() {
			return nil
		}
	}
	return errors.New("no answer")
}

// answers reports whether the process itself, and not another one that has its port, answers a PING.
func (s *server) answers() bool {
	conn, err := net.DialTimeout("tcp", s.addr, time.Second)
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := io.WriteString(conn, "PING\r\nINFO server\r\nQUIT\r\n"); err != nil {
		return false
	}
	reply, _ := io.ReadAll(conn) // an error shows in what is missing
	switch {
	case bytes.HasPrefix(reply, []byte("-NOAUTH")):
		return true // it was told to ask for a password before saying who it is
	case bytes.HasPrefix(reply, []byte("+PONG")):
		return bytes.Contains(reply, fmt.Appendf(nil, "\nprocess_id:%d\r\n", s.cmd.Process.Pid))
	default:
		return false // still loading
	}
}

// stop ends the process when the test does.
func (s *server) stop() {
	if s.cmd == nil {
		return // it never started
	}
	s.signal(syscall.SIGTERM)
	s.signal(syscall.SIGCONT) // a paused one must wake up to end
	select {
	case <-s.exited:
	case <-time.After(5 * time.Second):
		s.signal(syscall.SIGKILL)
		<-s.exited
	}
	if s.t.Failed() {
		s.t.Logf("log of %s:\n%s", s.program, s.log())
	}
}

func (s *server) signal(sig os.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.t.Fatalf("signal %s: %v", s.program, err)
	}
}

func (s *server) logFile() string { return filepath.Join(s.dir, "log") }

func (s *server) log() string {
	text, err := os.ReadFile(s.logFile())
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// clusterServer starts program as a cluster of one node that serves every slot, and returns a client of it.
func clusterServer(t testing.TB, program string, opts ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	t.Helper()
	s := startServer(t, program, "--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1")
	ctx, cancel := context.WithTimeout(t.Context(), serverWait)
	defer cancel()
	node := s.client(t)
	if err := node.ClusterAddSlotsRange(ctx, 0, 16383).Err(); err != nil {
		t.Fatalf("add slots: %v", err)
	}
	for { // a new node takes two seconds until it believes in itself
		info, err := node.ClusterInfo(ctx).Result()
		if err != nil {
			t.Fatalf("cluster of %s never became ready: %v", program, err)
		}
		if strings.Contains(info, "cluster_state:ok") {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	o := &redis.ClusterOptions{Addrs: []string{s.addr}}
	for _, opt := range opts {
		opt(o)
	}
	c := redis.NewClusterClient(o)
	t.Cleanup(func() { c.Close() })
	return c
}
