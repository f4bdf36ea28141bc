//go:build unix

package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"example.com/redislock"
	"example.com/redislock/pgfence"
	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

const (
	account = 7
	opening = 100
	first   = 10 // deposits
	second  = 20
	right   = opening + first + second
)

// play runs all acts and writes the story and, as its last line, the summary. It fails when an act does not come out as promised.
func play(ctx context.Context, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // several times what it takes
	defer cancel()
	s := &stage{out: out, began: time.Now()}
	defer func() { err = errors.Join(err, s.stop()) }()
	if err := s.start(ctx); err != nil {
		return err
	}
	var ends []ending
	for _, act := range []struct{ name, title string }{
		{actPlain, "a plain lock"},
		{actFenced, "WithFencing, pgfence.Claim and pgfence.Guard"},
		{actRowLock, "the row lock, pgfence.Middleware and pgfence.Tx"},
	} {
		fmt.Fprintf(out, "\n%s: %s\n", act.name, act.title)
		end, err := s.act(ctx, act.name)
		if err != nil {
			return fmt.Errorf("act %s: %w", act.name, cmp.Or(ctx.Err(), err)) // not all errors say that they come from ctx's end
		}
		ends = append(ends, end)
	}
	fmt.Fprintf(out, "\nsummary: %v %v %v\n", ends[0], ends[1], ends[2])
	return judge(ends)
}

// ending is how an act came out.
type ending struct {
	act     string
	balance int
	refused int // late writes
}

func (e ending) String() string {
	if e.balance != right {
		return fmt.Sprintf("%s=corrupted(%d)", e.act, e.balance)
	}
	return fmt.Sprintf("%s=right(%d)", e.act, e.balance)
}

// judge compares the endings with what is promised.
func judge(got []ending) error {
	for i, want := range []ending{{actPlain, opening + first, 0}, {actFenced, right, 1}, {actRowLock, right, 1}} {
		if got[i] != want {
			return fmt.Errorf("act %s ended with balance %d and %d refused writes, want %d and %d",
				want.act, got[i].balance, got[i].refused, want.balance, want.refused)
		}
	}
	return nil
}

// stage has the servers, the queue and the audience.
type stage struct {
	servers
	mu    sync.Mutex
	out   io.Writer
	began time.Time
	db    *pgxpool.Pool
	queue *asynq.Client
}

func (s *stage) start(ctx context.Context) (err error) {
	if err = s.servers.start(ctx); err != nil {
		return err
	}
	s.say("stage", "%s, PostgreSQL at %s, TTL %v", s.redisName, s.postgres.Addr(), ttl)
	s.queue = asynq.NewClient(asynq.RedisClientOpt{Addr: s.redisAddr})
	if s.db, err = pgxpool.New(ctx, s.postgres.URL("postgres")); err != nil {
		return err
	}
	if err := pgfence.Migrate(ctx, s.db); err != nil {
		return err
	}
	_, err = s.db.Exec(ctx, "CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)")
	return err
}

func (s *stage) stop() error {
	if s.db != nil {
		s.db.Close()
	}
	if s.queue != nil {
		_ = s.queue.Close()
	}
	return s.servers.stop()
}

// act has the first worker stopped in the middle of its deposit and woken up when the second has made its own.
func (s *stage) act(ctx context.Context, name string) (end ending, err error) {
	end.act = name
	if _, err := s.db.Exec(ctx, `INSERT INTO accounts VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET balance = $2`, account, opening); err != nil {
		return end, err
	}
	worker1, err := s.hire(name, "worker-1")
	if err != nil {
		return end, err
	}
	defer worker1.dismiss()
	if err := s.enqueue(ctx, "deposit-1", first); err != nil {
		return end, err
	}
	if _, err := worker1.await(ctx, thinking); err != nil {
		return end, err
	}
	worker1.signal(syscall.SIGSTOP)
	s.say("stage", "stops worker-1 (SIGSTOP), in the middle of deposit-1")

	worker2, err := s.hire(name, "worker-2")
	if err != nil {
		return end, err
	}
	defer worker2.dismiss()
	if err := s.enqueue(ctx, "deposit-2", second); err != nil {
		return end, err
	}
	if err := worker2.finish(ctx); err != nil {
		return end, err
	}
	if name == actRowLock {
		if err := s.seeSessionEnded(ctx); err != nil {
			return end, err
		}
	}
	s.say("stage", "wakes worker-1 (SIGCONT): it goes on to write what it had in mind")
	worker1.goOn()
	worker1.signal(syscall.SIGCONT)
	late, err := worker1.await(ctx, ran)
	if err != nil {
		return end, err
	}
	if late.Refused {
		end.refused++
		if err := s.again(ctx, worker1, worker2); err != nil {
			return end, err
		}
	}
	if end.balance, err = read(ctx, s.db, account); err != nil {
		return end, err
	}
	s.say("stage", "%d + %d + %d = %d, and the balance is %d", opening, first, second, right, end.balance)
	return end, nil
}

// again waits until one of the workers has made the deposit that was refused. It is not said which.
func (s *stage) again(ctx context.Context, worker1, worker2 *player) error {
	ctx, cancel := context.WithCancel(ctx)
	results := make(chan error)
	for _, p := range []*player{worker1, worker2} {
		go func() { results <- p.finish(ctx) }()
	}
	err := <-results
	cancel()
	<-results // the other has waited in vain
	return err
}

// seeSessionEnded waits until PostgreSQL has no transaction of worker-1 any more.
func (s *stage) seeSessionEnded(ctx context.Context) error {
	for open := true; open; {
		if err := s.db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'worker-1' AND xact_start IS NOT NULL)`).Scan(&open); err != nil {
			return err
		}
	}
	s.say("stage", "PostgreSQL has ended the session of worker-1, and with it the lock and the transaction")
	return nil
}

func (s *stage) enqueue(ctx context.Context, id string, amount int) error {
	payload, err := json.Marshal(deposit{Account: account, Amount: amount})
	if err != nil {
		return err
	}
	_, err = s.queue.EnqueueContext(ctx, asynq.NewTask("deposit", payload), asynq.TaskID(id))
	return err
}

// say writes one line of the story: when, who, what.
func (s *stage) say(who, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, "%6.2fs  %-8s  %s\n", time.Since(s.began).Seconds(), who, fmt.Sprintf(format, args...))
}

// message is what a worker tells the stage.
type message struct {
	Cue     cue
	Text    string
	Refused bool // as an act wants it to be
	Failed  bool
}

type cue string

const (
	thinking cue = "thinking" // waits for a word from the stage
	ran      cue = "ran"
	aside    cue = "aside"
)

// player is a worker process, as the stage sees it.
type player struct {
	name     string
	stage    *stage
	cmd      *exec.Cmd
	words    io.WriteCloser
	messages chan message // closed when the process has no more to say
	once     sync.Once
}

const roleVariable = "FENCED_WORKER" // makes this program a worker: its role as JSON

// role is what a worker process is told at its start.
type role struct{ Name, Act, Redis, Postgres string }

func (s *stage) hire(act, name string) (*player, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	r, err := json.Marshal(role{name, act, s.redisAddr, s.postgres.URL("postgres") + "&application_name=" + name})
	if err != nil {
		return nil, err
	}
	p := &player{name: name, stage: s, cmd: exec.Command(self), messages: make(chan message, 100)}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+string(r))
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = apart()
	if p.words, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	said, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.messages)
		for lines := json.NewDecoder(said); ; {
			var m message
			if lines.Decode(&m) != nil {
				return
			}
			p.messages <- m
		}
	}()
	return p, nil
}

// await tells the audience what the worker says up to a cue.
func (p *player) await(ctx context.Context, c cue) (message, error) {
	for {
		select {
		case m, ok := <-p.messages:
			if !ok {
				return m, fmt.Errorf("%s has ended", p.name)
			}
			p.stage.say(p.name, "%s", m.Text)
			if m.Cue == c {
				return m, nil
			}
		case <-ctx.Done():
			return message{}, fmt.Errorf("wait for %s: %w", p.name, ctx.Err())
		}
	}
}

// finish lets the worker think and then write.
func (p *player) finish(ctx context.Context) error {
	if _, err := p.await(ctx, thinking); err != nil {
		return err
	}
	p.goOn()
	m, err := p.await(ctx, ran)
	if err == nil && m.Failed {
		err = errors.New(p.name + " " + m.Text)
	}
	return err
}

// goOn is the word that a thinking worker waits for. A stopped one reads it when it wakes up.
func (p *player) goOn() { _, _ = io.WriteString(p.words, "go on\n") }

func (p *player) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// dismiss ends the process: in order, or after a while by force.
func (p *player) dismiss() {
	p.once.Do(func() {
		p.words.Close()
		p.signal(syscall.SIGTERM)
		p.signal(syscall.SIGCONT)
		force := time.AfterFunc(5*time.Second, func() { p.signal(syscall.SIGKILL) })
		defer force.Stop()
		for range p.messages {
		}
		_ = p.cmd.Wait()
	})
}

// work is the life of a worker process.
func work(asJSON string) error {
	var r role
	if err := json.Unmarshal([]byte(asJSON), &r); err != nil {
		return err
	}
	pool, err := pgxpool.New(context.Background(), r.Postgres)
	if err != nil {
		return err
	}
	defer pool.Close()
	rdb := redis.NewClient(&redis.Options{Addr: r.Redis})
	defer rdb.Close()
	p := &prompter{act: r.Act, words: bufio.NewScanner(os.Stdin), out: json.NewEncoder(os.Stdout)}
	w := &worker{pool: pool, think: p.think}
	return w.serve(r.Act, rdb, p.observe)
}

// prompter is the stage, as a worker process sees it.
type prompter struct {
	act   string
	words *bufio.Scanner
	mu    sync.Mutex
	out   *json.Encoder
}

func (p *prompter) tell(m message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.out.Encode(m)
}

// think tells what was read, and waits for the word to go on.
func (p *prompter) think(ctx context.Context, balance int) context.Context {
	id, _ := asynq.GetTaskID(ctx)
	p.tell(message{Cue: thinking, Text: fmt.Sprintf("has read a balance of %d for %s, and thinks", balance, id)})
	if !p.words.Scan() {
		return ctx // the play is broken off, and the lock's context with it
	}
	return context.WithoutCancel(ctx)
}

// refusals are what late writes must fail with; under a plain lock they don't.
var refusals = map[string]error{actFenced: pgfence.ErrStale, actRowLock: redislock.ErrLost}

// observe tells what becomes of locks and tasks.
func (p *prompter) observe(_ context.Context, e redislock.Event) {
	switch e.Kind {
	case redislock.EventAcquired:
		if e.Waited > ttl/2 {
			p.tell(message{Cue: aside, Text: fmt.Sprintf("has got the lock for %s, after %.1f s", e.TaskID, e.Waited.Seconds())})
		}
	case redislock.EventLost:
		p.tell(message{Cue: aside, Text: "is told: " + brief(e.Err)})
	case redislock.EventRan:
		m := message{Cue: ran, Text: "has made " + e.TaskID}
		if e.Err != nil {
			m.Failed = true
			m.Refused = errors.Is(e.Err, refusals[p.act])
			m.Text = fmt.Sprintf("has not made %s: %s", e.TaskID, brief(e.Err))
		}
		p.tell(m)
	case redislock.EventReleased:
	default: // nothing else should happen, so if it does, it should be seen
		p.tell(message{Cue: aside, Text: fmt.Sprintf("%s %s: %v", e.Kind, e.TaskID, e.Err)})
	}
}

// brief is an error without the digest in its key, and without what redislock adds to a handler's.
func brief(err error) string {
	text, _, _ := strings.Cut(err.Error(), " (redislock: lock is lost")
	if before, after, ok := strings.Cut(text, " lock redislock:{"); ok {
		if _, after, ok = strings.Cut(after, "}:"); ok {
			text = before + after
		}
	}
	return text
}
