package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"github.com/hibiken/asynq"

	"example.com/redislock"
)

// handOver is how long a lock lies free while a task waits for it.
type handOver struct {
	local  samples // seconds, in one process
	remote []remoteWait
}

// remoteWait is a hand-over between two processes, where the waiter polls the less often the longer it has waited.
type remoteWait struct {
	waited float64 // seconds
	late   samples // seconds after the release
}

// handOvers measures how soon a task that waits (policy Wait) starts after the release.
func handOvers(ctx context.Context, env *environment) (handOver, error) {
	env.progress("hand-over to a task that waits")
	waits := []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, time.Second, 3 * time.Second}
	if env.quick {
		waits = waits[:2]
	}
	w, err := newWaiter(env.s.addr)
	if err != nil {
		return handOver{}, err
	}
	defer w.close()
	var h handOver
	if h.local, err = w.local(ctx, env.count(100)); err != nil {
		return handOver{}, fmt.Errorf("bench: hand over a lock in one process: %w", err)
	}
	if h.remote, err = w.remote(ctx, env.s.addr, waits, env.count(20)); err != nil {
		return handOver{}, fmt.Errorf("bench: hand over a lock between processes: %w", err)
	}
	return h, nil
}

// waiter runs a task under a Locker that waits.
type waiter struct {
	*redislock.Locker
	task  *asynq.Task
	close func() error
}

func newWaiter(addr string) (*waiter, error) {
	rdb := client(addr)
	l, err := redislock.New(rdb, redislock.WithPolicy(redislock.Wait(time.Minute)), redislock.WithLogger(quiet))
	if err != nil {
		return nil, err
	}
	w := &waiter{Locker: l, task: asynq.NewTask("handover", nil)}
	w.close = func() error { return errors.Join(l.Shutdown(context.Background()), rdb.Close()) }
	return w, nil
}

// start makes the task wait and returns what tells when its handler started, or why it didn't.
func (w *waiter) start(ctx context.Context) <-chan started {
	c := make(chan started, 1)
	go func() {
		var at time.Time
		err := w.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
			at = time.Now()
			return nil
		})).ProcessTask(ctx, w.task)
		c <- started{at, err}
	}()
	return c
}

type started struct {
	at  time.Time
	err error
}

func (w *waiter) local(ctx context.Context, n int) (samples, error) {
	name, err := w.Name(ctx, w.task)
	if err != nil {
		return nil, err
	}
	var took samples
	for range n {
		lock, err := w.TryAcquire(ctx, name)
		if err != nil {
			return nil, err
		}
		waiting := w.start(ctx)
		time.Sleep(50*time.Millisecond + rand.N(50*time.Millisecond)) // it waits by now, and polls every few milliseconds
		released := time.Now()
		if err := lock.Release(ctx); err != nil {
			return nil, err
		}
		s := <-waiting
		if s.err != nil {
			return nil, s.err
		}
		took = append(took, s.at.Sub(released).Seconds())
	}
	return took, nil
}

func (w *waiter) remote(ctx context.Context, addr string, waits []time.Duration, n int) (rows []remoteWait, err error) {
	other, err := startHolder(addr)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, other.stop()) }()
	for _, d := range waits {
		row := remoteWait{waited: d.Seconds()}
		for range n {
			if err := other.hold(d); err != nil {
				return nil, err
			}
			waiting := w.start(ctx)
			released, err := other.released()
			if err != nil {
				return nil, err
			}
			s := <-waiting
			if s.err != nil {
				return nil, s.err
			}
			row.late = append(row.late, s.at.Sub(released).Seconds())
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// holdVariable makes this program, and its tests, a process that holds locks in the Redis at this address.
const holdVariable = "REDISLOCK_BENCH_HOLD"

func init() {
	addr := os.Getenv(holdVariable)
	if addr == "" {
		return
	}
	if err := holdOrders(addr, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// holdOrders reads how long to hold the lock, line by line. It answers each with a line when it has the lock, and with one
// when it lets go: the wall clock in nanoseconds, which both processes share.
func holdOrders(addr string, orders io.Reader, answers io.Writer) error {
	w, err := newWaiter(addr)
	if err != nil {
		return err
	}
	defer w.close()
	ctx := context.Background()
	name, err := w.Name(ctx, w.task)
	if err != nil {
		return err
	}
	for lines := bufio.NewScanner(orders); lines.Scan(); {
		d, err := time.ParseDuration(lines.Text())
		if err != nil {
			return err
		}
		lock, err := w.TryAcquire(ctx, name)
		if err != nil {
			return err
		}
		fmt.Fprintln(answers, "held")
		time.Sleep(d)
		at := time.Now().UnixNano()
		if err := lock.Release(ctx); err != nil {
			return err
		}
		fmt.Fprintln(answers, at)
	}
	return nil
}

// holderProcess is the other process.
type holderProcess struct {
	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Scanner
}

func startHolder(addr string) (*holderProcess, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &holderProcess{cmd: exec.Command(program)}
	p.cmd.Env = append(os.Environ(), holdVariable+"="+addr)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for this program, whose end closes the other's input
	if p.orders, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.answers = bufio.NewScanner(out)
	return p, p.cmd.Start()
}

// hold returns when the other process has the lock, which it then holds for d.
func (p *holderProcess) hold(d time.Duration) error {
	if _, err := fmt.Fprintln(p.orders, d); err != nil {
		return err
	}
	_, err := p.answer()
	return err
}

// released waits for the release and returns its time.
func (p *holderProcess) released() (time.Time, error) {
	text, err := p.answer()
	if err != nil {
		return time.Time{}, err
	}
	ns, err := strconv.ParseInt(text, 10, 64)
	return time.Unix(0, ns), err
}

func (p *holderProcess) answer() (string, error) {
	if !p.answers.Scan() {
		return "", cmpErr(p.answers.Err(), "the other process has ended")
	}
	return p.answers.Text(), nil
}

func (p *holderProcess) stop() error {
	_ = p.orders.Close() // Wait tells more
	return p.cmd.Wait()
}
