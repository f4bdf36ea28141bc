// Package virtual is the stage on which tests play: a world with its own clock, one Redis, and hosts that reach it over
// links that can fail. Everything is the real thing (asynq's servers, client and scheduler, go-redis, the middleware),
// except that the Redis is miniredis and that time jumps to the next timer as soon as every goroutine is blocked.
//
// What to know before writing a test on it:
//
//   - A goroutine that waits for a mutex does not count as blocked, so a goroutine that sleeps while it holds one that
//     others want stops the clock, and the test hangs in real time. go-redis dials, and its PubSub shakes hands, under
//     a mutex: that is why a dial is refused at once, why no fault touches a handshake, and why Server.Ping (which holds
//     asynq's state mutex) is not to be called over a broken link.
//   - The clock only moves while the test function runs. Whatever needs time to end must end in World.end, which AtEnd adds to.
//   - A channel, timer or WaitGroup belongs to the bubble that made it. Package variables outlive a bubble: go-redis keeps
//     a sync.Pool of timers for callers that wait for a free connection, and taking one from an earlier test would panic,
//     so the pools here are too large for anybody to wait.
//   - After a connection broke, go-redis waits up to half a second before it sends again: a command may be late by that.
//   - What costs real time is Lua: a script takes miniredis 0.3 ms, and a whole one under -race. asynq lives on scripts: an
//     idle server runs about four in a virtual second (see Host.Serve), and each task takes three.
//   - All hosts are one process: host name and PID, as asynq and Holder show them, are the same everywhere.
//   - At one and the same instant, goroutines run in any order. Leave a few milliseconds between things whose order matters.
package virtual

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// Run runs fn in a world of its own, and takes that world down when fn has returned or failed. The t that fn gets is
// the one to use in there: the outer one's Context belongs to real time, and its Fatal would end the wrong test.
func Run(t *testing.T, fn func(t *testing.T, w *World)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		defer w.end()
		fn(t, w)
	})
}

// World is one Redis and everything that talks to it, under a virtual clock.
type World struct {
	T         *testing.T
	Redis     *miniredis.Miniredis // to look into or to tamper with, by direct calls
	RDB       *redis.Client        // the same Redis over a link without faults
	client    *asynq.Client        // enqueues over rdb
	Inspector *asynq.Inspector     // over rdb
	Over      chan struct{}        // closed when the test function has returned; for handlers that never return by themselves

	Began      time.Time
	wires      sync.WaitGroup
	background sync.WaitGroup

	order sync.Mutex // held while a tapped command is done and seen

	mu       sync.Mutex
	links    []*Link
	closers  []io.Closer
	stops    []func()
	handlers map[*string]bool
	log      []string
}

func newWorld(t *testing.T) *World {
	w := &World{
		T:        t,
		Redis:    miniredis.NewMiniRedis(), // not started: a listener's Accept would keep the clock from moving
		Over:     make(chan struct{}),
		Began:    time.Now(),
		handlers: map[*string]bool{},
	}
	w.Redis.ClockTTL(true) // keys expire by the virtual clock, to the nanosecond
	w.RDB = w.Dialer(w.newLink())
	w.client = asynq.NewClientFromRedisClient(w.RDB)
	w.Inspector = asynq.NewInspectorFromRedisClient(w.RDB)
	return w
}

// end takes the world down, in an order in which everybody can still say goodbye: links are mended, handlers let go,
// servers shut down, and only then the clients closed.
func (w *World) end() {
	for _, l := range w.links {
		l.Heal()
	}
	close(w.Over)
	for _, stop := range w.stops {
		w.background.Go(stop)
	}
	w.background.Wait()
	for limit := time.Now().Add(time.Hour); w.runningHandlers() != "" && time.Now().Before(limit); {
		time.Sleep(100 * time.Millisecond)
	}
	if left := w.runningHandlers(); left != "" {
		w.T.Errorf("handlers that never returned (they should wait for World.Over): %s", left)
	}
	time.Sleep(2 * time.Second) // releases that a handler left behind

	for _, c := range w.closers {
		_ = c.Close()
	}
	time.Sleep(2 * time.Second) // go-redis redials in the background once a second, and only then sees that it is closed
	for _, l := range w.links {
		l.Cut()
	}
	w.wires.Wait()
	w.Redis.Close()

	w.mu.Lock() // for a log line of a goroutine that should not be there any more
	defer w.mu.Unlock()
	if w.T.Failed() || testing.Verbose() {
		const most = 200
		if skip := len(w.log) - most; skip > 0 {
			w.log = append([]string{fmt.Sprintf("… %d lines", skip)}, w.log[skip:]...)
		}
		w.T.Logf("log of this world, by the virtual clock:\n%s", strings.Join(w.log, "\n"))
	}
}

// Elapsed is the virtual time since the world began.
func (w *World) Elapsed() time.Duration { return time.Since(w.Began) }

// Alone runs fn, which tampers with Redis, while no tapped link has a command on its way. It must not wait for time.
func (w *World) Alone(fn func()) {
	w.order.Lock()
	defer w.order.Unlock()
	fn()
}

// Spawn runs fn in a goroutine that the end of the world waits for.
func (w *World) Spawn(fn func()) { w.background.Go(fn) }

// Until lets virtual time pass until cond holds, and fails the test if it does not within limit. It looks every 10 ms
// at first, and then ever more seldom, up to every second: real time goes by in looking.
func (w *World) Until(limit time.Duration, what string, cond func() bool) {
	w.T.Helper()
	for start := time.Now(); !cond(); {
		waited := time.Since(start)
		if waited >= limit {
			w.T.Fatalf("after %s still not: %s", limit, what)
		}
		time.Sleep(min(max(waited/20, 10*time.Millisecond), time.Second, limit-waited))
	}
}

// Busy is a handler's work that heeds its context: nil after d, the context's cause if that comes first.
func Busy(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// Deaf is a handler's work that heeds nothing: it takes d, or until the end of the world.
func (w *World) Deaf(d time.Duration) {
	select {
	case <-w.Over:
	case <-time.After(d):
	}
}

// Enqueue enqueues a task, in the queue "default" unless an option says otherwise.
func (w *World) Enqueue(task *asynq.Task, opts ...asynq.Option) *asynq.TaskInfo {
	w.T.Helper()
	info, err := w.client.Enqueue(task, opts...)
	if err != nil {
		w.T.Fatalf("enqueue %s: %v", task.Type(), err)
	}
	return info
}

// State returns the state of a task in a word: "pending", "active", "scheduled", "retry", "archived", "completed", or
// "gone" when asynq has deleted it, which is what it does with a task that is done. It reads Redis directly, which is
// much cheaper than asking the inspector, whose every question is a Lua script.
func (w *World) State(info *asynq.TaskInfo) string {
	return cmp.Or(w.Redis.HGet("asynq:{"+info.Queue+"}:t:"+info.ID, "state"), "gone")
}

// Drained reports whether queues (or "default") hold no task that is still to be run or running. As cheap as State.
func (w *World) Drained(queues ...string) bool {
	if len(queues) == 0 {
		queues = []string{"default"}
	}
	for _, q := range queues {
		for _, state := range []string{"pending", "active", "scheduled", "retry"} {
			if w.Redis.Exists("asynq:{" + q + "}:" + state) {
				return false
			}
		}
	}
	return true
}

// Settled reports whether asynq is through with a task.
func (w *World) Settled(info *asynq.TaskInfo) bool {
	s := w.State(info)
	return s == "gone" || s == "archived" || s == "completed"
}

// Task returns what asynq knows of a task by now; nil when it is gone.
func (w *World) Task(info *asynq.TaskInfo) *asynq.TaskInfo {
	w.T.Helper()
	now, err := w.Inspector.GetTaskInfo(info.Queue, info.ID)
	switch {
	case errors.Is(err, asynq.ErrTaskNotFound), errors.Is(err, asynq.ErrQueueNotFound):
		return nil
	case err != nil:
		w.T.Fatalf("inspect task %s: %v", info.ID, err)
	}
	return now
}

// Stats returns the numbers of a queue; zero for one that nothing was ever enqueued in.
func (w *World) Stats(queue string) asynq.QueueInfo {
	w.T.Helper()
	info, err := w.Inspector.GetQueueInfo(queue)
	switch {
	case errors.Is(err, asynq.ErrQueueNotFound):
		return asynq.QueueInfo{Queue: queue}
	case err != nil:
		w.T.Fatalf("inspect queue %s: %v", queue, err)
	}
	return *info
}

// Untouched fails the test unless the task has lost none of its retries and asynq has counted no failure in its queue.
func (w *World) Untouched(info *asynq.TaskInfo) {
	w.T.Helper()
	if now := w.Task(info); now != nil && now.Retried != 0 {
		w.T.Errorf("Retried is %d, want 0: %s", now.Retried, now.LastErr)
	}
	if failed := w.Stats(info.Queue).Failed; failed != 0 {
		w.T.Errorf("asynq counted %d failures, want 0", failed)
	}
}

// Logf adds a line to the world's log, which is shown when a test fails or with -v.
func (w *World) Logf(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, fmt.Sprintf("%10.3fs ", w.Elapsed().Seconds())+fmt.Sprintf(format, args...))
}

// Lines returns the world's log so far.
func (w *World) Lines() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.log)
}

// Logged reports whether a line of the world's log contains text.
func (w *World) Logged(text string) bool {
	return slices.ContainsFunc(w.Lines(), func(line string) bool { return strings.Contains(line, text) })
}

// Dialer returns a client over l, closed at the end of the world.
func (w *World) Dialer(l *Link, tune ...func(*redis.Options)) *redis.Client {
	opt := &redis.Options{
		Addr:            "192.0.2.1:6379", // never dialled; an address, since newer versions of go-redis look names up
		Dialer:          l.dial,
		ReadTimeout:     3 * time.Second, // go-redis's own, which newer versions have made longer
		WriteTimeout:    3 * time.Second,
		PoolSize:        1000, // see the sync.Pool above
		DisableIdentity: true,
	}
	for _, fn := range tune {
		fn(opt)
	}
	rdb := redis.NewClient(opt)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closers = append(w.closers, rdb)
	return rdb
}

func (w *World) newLink() *Link {
	l := &Link{world: w, wires: map[*wire]bool{}}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.links = append(w.links, l)
	return l
}

// watched makes the end of the world wait for the handler, which asynq does not do for one that outlives its task.
func (w *World) watched(h *Host, next asynq.Handler) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		id, _ := asynq.GetTaskID(ctx)
		label := fmt.Sprintf("%s %s on %s", task.Type(), id, h.Name)
		w.mu.Lock()
		w.handlers[&label] = true
		w.mu.Unlock()
		defer func() {
			w.mu.Lock()
			delete(w.handlers, &label)
			w.mu.Unlock()
		}()
		return next.ProcessTask(ctx, task)
	})
}

func (w *World) runningHandlers() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var labels []string
	for label := range w.handlers {
		labels = append(labels, *label)
	}
	slices.Sort(labels)
	return strings.Join(labels, ", ")
}

// Host is one machine. It reaches Redis over two links, so that locks can have trouble that asynq does not have.
type Host struct {
	Name      string
	World     *World
	RDB       *redis.Client // for locks, over LockLink, with 3 s timeouts and 3 resends
	LockLink  *Link
	queue     *redis.Client // for asynq, over QueueLink
	QueueLink *Link
	Client    *asynq.Client // enqueues over QueueLink
	Logger    *slog.Logger  // into the world's log
}

// Host adds a machine; tune changes the options of the client for locks.
func (w *World) Host(name string, tune ...func(*redis.Options)) *Host {
	h := &Host{Name: name, World: w, LockLink: w.newLink(), QueueLink: w.newLink()}
	h.LockLink.keep = true
	h.RDB = w.Dialer(h.LockLink, tune...)
	h.queue = w.Dialer(h.QueueLink)
	h.queue.AddHook(costly{})
	h.Client = asynq.NewClientFromRedisClient(h.queue)
	h.Logger = slog.New(slog.NewTextHandler(HostLog{h}, &slog.HandlerOptions{
		Level: slog.LevelDebug,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{} // the world's log has its own
			}
			return a
		},
	}))
	return h
}

// Serve starts an asynq server on the host, and shuts it down at the end of the world if the test has not done so.
// Where cfg is silent it looks for tasks about every 500 ms, for due retries every second, and runs ten at a time. A test
// of hours should choose longer intervals: asynq's rounds are what its real time goes into.
func (h *Host) Serve(cfg asynq.Config, handler asynq.Handler) *asynq.Server {
	h.World.T.Helper()
	cfg.Concurrency = cmp.Or(cfg.Concurrency, 10)
	cfg.TaskCheckInterval = cmp.Or(cfg.TaskCheckInterval, 500*time.Millisecond)
	cfg.DelayedTaskCheckInterval = cmp.Or(cfg.DelayedTaskCheckInterval, time.Second)
	cfg.JanitorInterval = cmp.Or(cfg.JanitorInterval, time.Minute)
	if cfg.Logger == nil {
		cfg.Logger = HostLog{h}
	}
	srv := asynq.NewServerFromRedisClient(h.queue, cfg)
	if err := srv.Start(h.World.watched(h, handler)); err != nil {
		h.World.T.Fatalf("start server on %s: %v", h.Name, err)
	}
	h.World.AtEnd(srv.Shutdown)
	return srv
}

// Schedule starts an asynq scheduler on the host that enqueues task by cronspec, in UTC; the world begins on a full hour.
func (h *Host) Schedule(cronspec string, task *asynq.Task, opts ...asynq.Option) *asynq.Scheduler {
	h.World.T.Helper()
	return h.ScheduleWith(&asynq.SchedulerOpts{Logger: HostLog{h}, HeartbeatInterval: time.Minute}, cronspec, task, opts...)
}

// ScheduleWith is Schedule with a scheduler of other options.
func (h *Host) ScheduleWith(how *asynq.SchedulerOpts, cronspec string, task *asynq.Task, opts ...asynq.Option) *asynq.Scheduler {
	h.World.T.Helper()
	s := asynq.NewSchedulerFromRedisClient(h.queue, how)
	if _, err := s.Register(cronspec, task, opts...); err != nil {
		h.World.T.Fatalf("schedule %s on %s: %v", task.Type(), h.Name, err)
	}
	if err := s.Start(); err != nil {
		h.World.T.Fatalf("start scheduler on %s: %v", h.Name, err)
	}
	h.World.AtEnd(s.Shutdown)
	return s
}

// Unwatched keeps the host's servers from telling Redis every 5 s who they are and what they run, which only asynq's inspector
// reads. In a world of many hours it is what most of the real time goes into. What keeps leases alive is still sent.
func (h *Host) Unwatched() { h.queue.AddHook(unwatched{}) }

type unwatched struct{ costly }

func (unwatched) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		for _, arg := range cmd.Args() {
			key, _ := arg.(string)
			if key == "asynq:servers" || key == "asynq:workers" || strings.HasPrefix(key, "asynq:servers:{") {
				return nil
			}
		}
		return next(ctx, cmd)
	}
}

func (unwatched) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Cut cuts both links: to the others, the host is dead.
func (h *Host) Cut() { h.LockLink.Cut(); h.QueueLink.Cut() }

// AtEnd runs stop when the test function has returned, beside the other stops, and while Redis can still be reached.
func (w *World) AtEnd(stop func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stops = append(w.stops, stop)
}

// HostLog is asynq's logger and slog's writer.
type HostLog struct{ host *Host }

func (l HostLog) line(level string, args []any) {
	l.host.World.Logf("%s asynq %s %s", l.host.Name, level, fmt.Sprint(args...))
}
func (l HostLog) Debug(args ...any) { l.line("debug", args) }
func (l HostLog) Info(args ...any)  { l.line("info", args) }
func (l HostLog) Warn(args ...any)  { l.line("warn", args) }
func (l HostLog) Error(args ...any) { l.line("error", args) }
func (l HostLog) Fatal(args ...any) {
	l.line("fatal", args)
	l.host.World.T.Errorf("asynq on %s: %s", l.host.Name, fmt.Sprint(args...))
}
func (l HostLog) Write(p []byte) (int, error) {
	l.host.World.Logf("%s %s", l.host.Name, bytes.TrimSpace(p))
	return len(p), nil
}

// costly is a go-redis hook that makes a failed command take 10 ms. asynq asks for the next task in a loop that does not
// pause after an error: at no cost that loop would never let the clock move. It must be taken here and not in the dialer.
type costly struct{}

func (costly) DialHook(next redis.DialHook) redis.DialHook { return next }

func (costly) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		payFor(err, cmd)
		return err
	}
}

func (costly) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		payFor(err, cmds...)
		return err
	}
}

func payFor(err error, cmds ...redis.Cmder) {
	if err == nil || errors.Is(err, redis.Nil) || len(cmds) == 0 || isHandshake(cmds[0].Name()) {
		return
	}
	time.Sleep(10 * time.Millisecond)
}

// Link is the network between one client and Redis. It reads the traffic command by command, so that a fault can meet
// exactly the command it is meant for; go-redis only ever sees a connection that answers, breaks or stays silent.
// All methods may be called concurrently, and from within a fault's function.
type Link struct {
	world *World

	mu     sync.Mutex
	down   bool
	hung   bool
	lag    time.Duration
	faults []*Fault
	wires  map[*wire]bool
	keep   bool // what was sent
	log    []Command
	tap    func(Command, []byte)
	answer func(Command) string
}

// Command is a command as it came out of the client; one that go-redis sent again counts again.
type Command struct {
	At     time.Time
	Name   string // in capitals
	Args   []string
	Script string // of EVAL and EVALSHA: its SHA-1 in hex, as redis.Script's Hash gives it
}

// is reports whether the command is what (a command's name, a script's hash, or "" for any) and has all of args
// (a key, say) among its arguments.
func (c Command) is(what string, args ...string) bool {
	if what != "" && !strings.EqualFold(what, c.Name) && !strings.EqualFold(what, c.Script) {
		return false
	}
	return !slices.ContainsFunc(args, func(arg string) bool { return !slices.Contains(c.Args, arg) })
}

func (c Command) String() string { return c.Name + " " + strings.Join(c.Args, " ") }

// Keys returns the keys of a command with one key or a script, as Redis would find them.
func (c Command) Keys() []string {
	if c.Script == "" {
		return c.Args[:1]
	}
	n, _ := strconv.Atoi(c.Args[1])
	return c.Args[2:][:n]
}

// Cut breaks every connection and refuses new ones. What a client had sent and a delay still holds up is gone.
func (l *Link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	for c := range l.wires {
		c.breakOff()
	}
}

// Break breaks every connection, as a server does that restarts. New ones can be made at once.
func (l *Link) Break() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.wires {
		c.breakOff()
	}
}

// Hang makes the network half-open: what is sent from now on is taken and vanishes, and no reply ever comes, so that a
// client waits for its own deadline. New connections can be made, and hang in the same way.
func (l *Link) Hang() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hung = true
}

// Slow makes every command take d on its way to Redis. A client that gives up meanwhile has still sent it.
func (l *Link) Slow(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lag = d
}

// Heal ends cut, hang and slow, and drops all faults. Connections that have lost something break.
func (l *Link) Heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down, l.hung, l.lag, l.faults = false, false, 0, nil
	for c := range l.wires {
		if c.deaf {
			c.breakOff()
		}
	}
}

// Tap has fn see each command that Redis has done, with the reply as it goes over the wire, before the client does. The taps
// of all links see the commands in the order in which Redis did them, one at a time. A tapped link remembers nothing for Sent.
func (l *Link) Tap(fn func(c Command, reply []byte)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tap, l.keep = fn, false
}

// Answer has fn answer commands in Redis's place, where it returns a reply as it goes over the wire, and not "". It is for what
// an idle server asks all the time: a script costs more real time than everything else.
func (l *Link) Answer(fn func(Command) string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answer = fn
}

// Record makes the link remember its commands. Links for locks do from the start; asynq's would fill the memory.
func (l *Link) Record() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.keep = true
}

// Sent returns the commands that went out so far and match, oldest first, handshakes left out.
func (l *Link) Sent(what string, args ...string) []Command {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []Command
	for _, c := range l.log {
		if c.is(what, args...) {
			found = append(found, c)
		}
	}
	return found
}

// Forget empties the list that Sent reads.
func (l *Link) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = nil
}

// Next returns a fault, to be completed by its verb, for the next command that matches (see Command.is).
// Each command meets one fault at most: the oldest that matches.
func (l *Link) Next(what string, args ...string) *Fault {
	return &Fault{link: l, what: what, args: args, left: 1}
}

// Every is Next for all commands that match, until the fault is lifted or the link healed.
func (l *Link) Every(what string, args ...string) *Fault {
	return &Fault{link: l, what: what, args: args, left: -1}
}

// Fault is something that happens to a command.
type Fault struct {
	link  *Link
	what  string
	args  []string
	where func(Command) bool

	left, met int // how many it still waits for (negative: all); how many it met

	ahead, behind   func(*wire)
	refusal         string
	loses           loss
	leavesHangingUp bool // a loss is noticed by a broken connection; otherwise by nothing at all
}

type loss int

const (
	nothing loss = iota
	theRequest
	theReply
)

// Times makes the fault meet that many commands.
func (f *Fault) Times(n int) *Fault { f.left = n; return f }

// Where limits the fault to commands for which match is true. It is asked once for each that the fault would otherwise meet, so
// that it may note what it has said.
func (f *Fault) Where(match func(Command) bool) *Fault { f.where = match; return f }

// Before has fn run before Redis gets the command.
func (f *Fault) Before(fn func()) *Fault { f.ahead = func(*wire) { fn() }; return f.set() }

// After has fn run when Redis has done the command and the client does not know it yet.
func (f *Fault) After(fn func()) *Fault { f.behind = func(*wire) { fn() }; return f.set() }

// Delay holds the command up for d on its way to Redis, which gets it even if the client gives up meanwhile.
func (f *Fault) Delay(d time.Duration) *Fault {
	f.ahead = func(c *wire) { c.wait(d) }
	return f.set()
}

// DelayReply holds the reply up for d.
func (f *Fault) DelayReply(d time.Duration) *Fault {
	f.behind = func(c *wire) { c.wait(d) }
	return f.set()
}

// Refuse answers with an error, such as "LOADING Redis is loading the dataset in memory"; Redis never gets the command.
func (f *Fault) Refuse(text string) *Fault { f.refusal = text; return f.set() }

// LoseRequest breaks the connection before Redis gets the command.
func (f *Fault) LoseRequest() *Fault { f.loses, f.leavesHangingUp = theRequest, true; return f.set() }

// LoseReply breaks the connection after Redis did the command: the client can't know whether it did.
func (f *Fault) LoseReply() *Fault { f.loses, f.leavesHangingUp = theReply, true; return f.set() }

// SwallowRequest lets the command vanish: the client waits in vain on a connection that looks alive.
func (f *Fault) SwallowRequest() *Fault { f.loses = theRequest; return f.set() }

// SwallowReply has Redis do the command, and lets the client wait in vain on a connection that looks alive.
func (f *Fault) SwallowReply() *Fault { f.loses = theReply; return f.set() }

func (f *Fault) set() *Fault {
	f.link.mu.Lock()
	defer f.link.mu.Unlock()
	f.link.faults = append(f.link.faults, f)
	return f
}

// Lift ends the fault.
func (f *Fault) Lift() {
	f.link.mu.Lock()
	defer f.link.mu.Unlock()
	f.left = 0
}

// Hits returns how many commands met the fault.
func (f *Fault) Hits() int {
	f.link.mu.Lock()
	defer f.link.mu.Unlock()
	return f.met
}

// wire is one connection: a pipe to the client, another to miniredis, and what happens in between.
type wire struct {
	link     *Link
	client   net.Conn
	server   net.Conn
	requests chan Command // a buffer, so that a client can write a whole pipeline before it reads
	broken   chan struct{}
	once     sync.Once
	pushes   bool // what comes from Redis is carried by push
	deaf     bool // guarded by Link.mu: something got lost here, so that nothing may follow it
}

// dial is the Dialer of the link's client.
func (l *Link) dial(context.Context, string, string) (net.Conn, error) {
	server, err := l.world.Redis.Dial() // before the lock: miniredis holds its own while it waits for a wire to push to
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		_ = server.Close()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	near, far := net.Pipe()
	c := &wire{link: l, client: far, server: server, requests: make(chan Command, 1000), broken: make(chan struct{})}
	l.wires[c] = true
	l.world.wires.Go(c.take)
	l.world.wires.Go(c.carry)
	return &socket{Conn: near}, nil
}

// breakOff ends the connection on both sides.
func (c *wire) breakOff() {
	c.once.Do(func() {
		close(c.broken)
		_ = c.client.Close()
		_ = c.server.Close()
	})
}

// wait holds up the wire for d, or until it breaks.
func (c *wire) wait(d time.Duration) {
	select {
	case <-time.After(d):
	case <-c.broken:
	}
}

// take reads the client's requests. When the client hangs up, what it had sent is still carried to Redis.
func (c *wire) take() {
	defer close(c.requests)
	in := bufio.NewReader(c.client)
	for {
		req, err := readCommand(in)
		if err != nil {
			return
		}
		select {
		case c.requests <- req:
		case <-c.broken:
			return
		}
	}
}

// carry takes one request after the other to Redis and its reply back.
func (c *wire) carry() {
	defer func() {
		c.breakOff()
		c.link.mu.Lock()
		delete(c.link.wires, c)
		c.link.mu.Unlock()
	}()
	replies := bufio.NewReader(c.server)
	for req := range c.requests {
		lag, f := c.meet(req)
		if lag > 0 {
			c.wait(lag)
		}
		if f.ahead != nil {
			f.ahead(c)
		}
		if f.refusal != "" {
			_, _ = io.WriteString(c.client, "-"+f.refusal+"\r\n")
			continue
		}
		if f.loses == theRequest && f.leavesHangingUp {
			return
		}
		if c.silent(req, f.loses == theRequest) {
			continue
		}
		reply, err := c.exchange(req, replies)
		if err != nil {
			return
		}
		if c.pushes { // replies come when they like
			continue
		}
		if f.behind != nil {
			f.behind(c)
		}
		if f.loses == theReply && f.leavesHangingUp {
			return
		}
		if c.silent(req, f.loses == theReply) {
			continue
		}
		_, _ = c.client.Write(reply) // to a client that has hung up: what it sent is done all the same
	}
}

// exchange has Redis do a command and returns its reply, unless push carries it.
func (c *wire) exchange(req Command, replies *bufio.Reader) (reply []byte, err error) {
	c.link.mu.Lock()
	tap, answer := c.link.tap, c.link.answer
	c.link.mu.Unlock()
	if answer != nil {
		if text := answer(req); text != "" {
			return []byte(text), nil
		}
	}
	if tap != nil {
		c.link.world.order.Lock()
		defer c.link.world.order.Unlock()
	}
	if _, err := c.server.Write(req.encode()); err != nil {
		return nil, err
	}
	if strings.HasSuffix(req.Name, "SUBSCRIBE") && !c.pushes {
		c.pushes = true
		c.link.world.wires.Go(func() { c.push(replies) })
	}
	if c.pushes {
		return nil, nil
	}
	reply, err = readReply(replies, nil)
	if err == nil && tap != nil {
		tap(req, reply)
	}
	return reply, err
}

// push carries what Redis publishes.
func (c *wire) push(replies *bufio.Reader) {
	for {
		reply, err := readReply(replies, nil)
		if err != nil {
			c.breakOff()
			return
		}
		if !c.silent(Command{Name: "PUBLISH"}, false) {
			_, _ = c.client.Write(reply)
		}
	}
}

// meet says what a command runs into: the link's lag, and a copy of the fault that is meant for it.
func (c *wire) meet(req Command) (time.Duration, Fault) {
	l := c.link
	l.mu.Lock()
	defer l.mu.Unlock()
	if isHandshake(req.Name) {
		return 0, Fault{}
	}
	if l.keep {
		l.log = append(l.log, req)
	}
	for _, f := range l.faults {
		if f.left != 0 && req.is(f.what, f.args...) && (f.where == nil || f.where(req)) {
			f.left--
			f.met++
			return l.lag, *f
		}
	}
	return l.lag, Fault{}
}

// silent reports whether this request, or its reply, gets lost without a sign, as from then on everything does.
func (c *wire) silent(req Command, lost bool) bool {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	if lost || c.link.hung && !isHandshake(req.Name) {
		c.deaf = true
	}
	return c.deaf
}

// isHandshake tells the commands that no fault touches: those that set up a connection, and a subscription's own. go-redis
// sends them with a mutex held, and a goroutine that waits for a mutex stops the clock.
func isHandshake(name string) bool {
	switch strings.ToUpper(name) {
	case "HELLO", "AUTH", "CLIENT", "SELECT", "SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE":
		return true
	}
	return false
}

// socket is the client's end of a wire, with the errors of a TCP connection instead of those of a pipe: whether go-redis
// sends a command again depends on them.
type socket struct {
	net.Conn
	closed atomic.Bool
}

func (s *socket) Close() error {
	s.closed.Store(true)
	return s.Conn.Close()
}

func (s *socket) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	return n, s.translate("read", err)
}

func (s *socket) Write(p []byte) (int, error) {
	n, err := s.Conn.Write(p)
	return n, s.translate("write", err)
}

// The three below fail on a pipe whose other end is closed; a TCP connection learns of that by reading or writing.
func (s *socket) SetDeadline(t time.Time) error      { return s.unless(s.Conn.SetDeadline(t)) }
func (s *socket) SetReadDeadline(t time.Time) error  { return s.unless(s.Conn.SetReadDeadline(t)) }
func (s *socket) SetWriteDeadline(t time.Time) error { return s.unless(s.Conn.SetWriteDeadline(t)) }

func (s *socket) unless(err error) error {
	if errors.Is(err, io.ErrClosedPipe) && !s.closed.Load() {
		return nil
	}
	return s.translate("set", err)
}

func (s *socket) translate(op string, err error) error {
	switch {
	case !errors.Is(err, io.ErrClosedPipe):
		return err
	case s.closed.Load():
		return &net.OpError{Op: op, Net: "tcp", Err: net.ErrClosed}
	default:
		return &net.OpError{Op: op, Net: "tcp", Err: syscall.ECONNRESET}
	}
}

// readCommand reads a request, which is an array of bulk strings.
func readCommand(r *bufio.Reader) (Command, error) {
	raw, err := readReply(r, nil)
	if err != nil {
		return Command{}, err
	}
	var words []string
	_, rest, _ := bytes.Cut(raw, []byte("\r\n")) // *n
	for len(rest) > 0 {
		head, tail, _ := bytes.Cut(rest, []byte("\r\n")) // $n
		n, err := strconv.Atoi(string(head[1:]))
		if err != nil || head[0] != '$' {
			return Command{}, fmt.Errorf("not a request: %q", raw)
		}
		words = append(words, string(tail[:n]))
		rest = tail[n+2:]
	}
	if len(words) == 0 {
		return Command{}, fmt.Errorf("not a request: %q", raw)
	}
	c := Command{At: time.Now(), Name: strings.ToUpper(words[0]), Args: words[1:]}
	switch {
	case len(c.Args) == 0:
	case c.Name == "EVALSHA":
		c.Script = c.Args[0]
	case c.Name == "EVAL":
		sum := sha1.Sum([]byte(c.Args[0]))
		c.Script = hex.EncodeToString(sum[:])
	}
	return c, nil
}

func (c Command) encode() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%d\r\n", 1+len(c.Args))
	for _, word := range append([]string{c.Name}, c.Args...) {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(word), word)
	}
	return b.Bytes()
}

// readReply appends one value in Redis's protocol, versions 2 and 3, to raw.
func readReply(r *bufio.Reader, raw []byte) ([]byte, error) {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	raw = append(raw, line...)
	n, _ := strconv.Atoi(string(bytes.TrimSpace(line[1:]))) // only used where it is a length
	switch line[0] {
	case '$', '=', '!':
		if n >= 0 {
			start := len(raw)
			raw = append(raw, make([]byte, n+2)...)
			_, err = io.ReadFull(r, raw[start:])
		}
	case '%':
		n *= 2
		fallthrough
	case '*', '~', '>':
		for range n {
			if raw, err = readReply(r, raw); err != nil {
				return nil, err
			}
		}
	}
	return raw, err
}

// Tally keeps account of who ran what and when. The zero value is ready; all methods may be called concurrently.
type Tally struct {
	mu       sync.Mutex
	runs     map[string][]*run
	collided []string
}

// run is one run of a handler. Its end is zero while it lasts.
type run struct{ Start, End time.Time }

// Start notes that a run of key begins, and returns what notes its end.
func (y *Tally) Start(key string) (end func()) {
	y.mu.Lock()
	defer y.mu.Unlock()
	r := &run{Start: time.Now()}
	for _, other := range y.runs[key] {
		if other.End.IsZero() {
			y.collided = append(y.collided, fmt.Sprintf("%s: a run began at %s, while that of %s went on",
				key, r.Start.Format("15:04:05.000"), other.Start.Format("15:04:05.000")))
		}
	}
	if y.runs == nil {
		y.runs = map[string][]*run{}
	}
	y.runs[key] = append(y.runs[key], r)
	return sync.OnceFunc(func() {
		y.mu.Lock()
		defer y.mu.Unlock()
		r.End = time.Now()
	})
}

// Overlaps describes every case of two runs of one key at once.
func (y *Tally) Overlaps() []string {
	y.mu.Lock()
	defer y.mu.Unlock()
	return slices.Clone(y.collided)
}

// Of returns the runs of key so far, in the order in which they began.
func (y *Tally) Of(key string) []run {
	y.mu.Lock()
	defer y.mu.Unlock()
	var found []run
	for _, r := range y.runs[key] {
		found = append(found, *r)
	}
	return found
}

// Count returns how many runs of key have begun.
func (y *Tally) Count(key string) int { return len(y.Of(key)) }

// Running returns how many runs of key are under way.
func (y *Tally) Running(key string) int {
	return len(slices.DeleteFunc(y.Of(key), func(r run) bool { return !r.End.IsZero() }))
}

// Quiet is a logger for redis.SetLogger that keeps go-redis from telling the terminal about every connection that a test breaks.
type Quiet struct{}

func (Quiet) Printf(context.Context, string, ...any) {}
