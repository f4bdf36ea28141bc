// Command faults runs real asynq workers under redislock, breaks what is around them, and checks from their histories that
// nothing was lost and nothing ran twice. It needs Linux and a redis-server.
//
//	go run . -duration 60s -workers 8 -keys 64 -faults all -server PATH -seed 1
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"example.com/redislock/faults/history"
	"github.com/redis/go-redis/v9"
)

func main() {
	if config, ok := os.LookupEnv(workerEnv); ok {
		exit(runWorker(config))
	}
	exit(campaigns())
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// settings are what the command line says.
type settings struct {
	params
	faults   string
	root     string // of the histories
	markdown string
	parallel int
}

func parseFlags() (s settings, err error) {
	var names []string
	for _, c := range classes {
		names = append(names, c.name)
	}
	flag.DurationVar(&s.duration, "duration", time.Minute, "how long the faults of each class last")
	flag.IntVar(&s.cycles, "cycles", 0, fmt.Sprintf("go on after that until this many locks of the class have ended and each of its faults was done, at most %v", longest))
	flag.DurationVar(&s.drain, "drain", 4*time.Second, "how long the workers may take to empty the queue afterwards")
	flag.IntVar(&s.workers, "workers", 8, "worker processes")
	flag.IntVar(&s.keys, "keys", 512, "different locks")
	flag.IntVar(&s.rate, "rate", 800, "tasks a second, as far as the workers keep up")
	flag.Uint64Var(&s.seed, "seed", uint64(time.Now().UnixNano()), "replays the same schedule of faults and the same tasks")
	flag.StringVar(&s.server, "server", "", "redis-server or valkey-server to run (default: redis-server in PATH)")
	flag.StringVar(&s.root, "dir", "", "keep the histories here (default: a temporary directory, kept if there is a violation or an error)")
	flag.StringVar(&s.faults, "faults", "all", "classes, separated by commas: "+strings.Join(names, ", "))
	flag.StringVar(&s.markdown, "markdown", "", "append a row of a table for each class to this file")
	flag.IntVar(&s.parallel, "parallel", 1, "classes at a time")
	flag.BoolVar(&s.short, "short", false, "all classes within two minutes: other defaults, and without those that take longer")
	flag.BoolVar(&s.again, "check", false, "check the histories in -dir once more, and run nothing")
	flag.Parse()
	if s.short {
		err = shortDefaults()
	}
	if s.again && s.root == "" {
		err = errors.New("-check needs -dir")
	}
	s.parallel = max(s.parallel, 1)
	return s, err
}

// shortDefaults sets the flags that the command line does not.
func shortDefaults() error {
	given := make(map[string]bool)
	flag.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for name, value := range map[string]string{
		"duration": "4s", "drain": "2s", "workers": "4", "keys": "48", "rate": "150", "seed": "1", "parallel": "3",
	} {
		if given[name] {
			continue
		}
		if err := flag.Set(name, value); err != nil {
			return err
		}
	}
	return nil
}

func campaigns() error {
	s, err := parseFlags()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	redis.SetLogger(silent{})
	chosen, err := chooseClasses(s.faults)
	if err != nil {
		return err
	}
	if s.short {
		chosen = shorten(chosen, s.duration)
	}
	if !s.again {
		if s.server, err = findServer(s.server); err != nil {
			return err
		}
	}
	temporary := s.root == ""
	if temporary {
		s.root, err = os.MkdirTemp("", "redislock-faults-")
	} else {
		s.root, err = filepath.Abs(s.root)
	}
	if err != nil {
		return err
	}
	if s.again {
		if chosen = s.kept(chosen); len(chosen) == 0 {
			return fmt.Errorf("no histories in %s", s.root)
		}
	}
	bad, err := s.runAll(ctx, chosen)
	if err != nil {
		return err
	}
	if bad > 0 {
		return fmt.Errorf("%d violations", bad)
	}
	if temporary {
		return os.RemoveAll(s.root)
	}
	return nil
}

// runAll runs the classes, some at a time, and reports each in their order. It returns the number of violations.
func (s *settings) runAll(ctx context.Context, chosen []class) (bad int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	type result struct {
		campaign *campaign
		findings history.Findings
		err      error
	}
	results := make([]chan result, len(chosen))
	for i := range results {
		results[i] = make(chan result, 1)
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for range s.parallel {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(chosen); i = int(next.Add(1)) - 1 {
				c := s.campaignOf(chosen[i])
				f, err := s.runOne(ctx, c)
				results[i] <- result{c, f, err}
			}
		})
	}
	for i := range chosen {
		r := <-results[i]
		if r.err != nil {
			return bad, r.err
		}
		report(os.Stdout, r.campaign, r.findings)
		if s.markdown != "" {
			if err := appendRow(s.markdown, r.campaign, r.findings); err != nil {
				return bad, err
			}
		}
		bad += len(r.findings.Violations)
	}
	return bad, nil
}

// kept returns the classes that have left a directory.
func (s *settings) kept(all []class) (chosen []class) {
	for _, c := range all {
		if _, err := os.Stat(filepath.Join(s.root, c.name)); err == nil {
			chosen = append(chosen, c)
		}
	}
	return chosen
}

// shorten leaves out the classes that take longer, and makes the others' faults more frequent.
func shorten(all []class, duration time.Duration) (chosen []class) {
	for _, c := range all {
		if c.least > 0 {
			fmt.Printf("%s: left out, it takes %v at least\n", c.name, c.least)
			continue
		}
		c.every = min(c.every, duration/6)
		chosen = append(chosen, c)
	}
	return chosen
}

// runOne runs a campaign, or reads what an earlier one has left, and checks it.
func (s *settings) runOne(ctx context.Context, c *campaign) (history.Findings, error) {
	run := c.run
	if s.again {
		run = func(context.Context) ([]history.Record, error) { return history.ReadDir(c.dir) }
	}
	records, err := run(ctx)
	if err != nil {
		return history.Findings{}, fmt.Errorf("class %s: %w", c.class.name, err)
	}
	f := c.check(records)
	c.checkEnough(&f)
	return f, c.order.Draw(c.dir)
}

// check reads the history with everything that can read one.
func (c *campaign) check(records []history.Record) history.Findings {
	f := history.Check(records, terms)
	c.order = history.CheckModel(records, terms)
	f.Violations = append(f.Violations, c.order.Violations...)
	return f
}

func (s *settings) campaignOf(class class) *campaign {
	return &campaign{params: s.params, class: class, dir: filepath.Join(s.root, class.name)}
}

func chooseClasses(names string) (chosen []class, err error) {
	if names == "all" {
		return classes, nil
	}
next:
	for name := range strings.SplitSeq(names, ",") {
		for _, c := range classes {
			if c.name == name {
				chosen = append(chosen, c)
				continue next
			}
		}
		return nil, fmt.Errorf("unknown class %q", name)
	}
	return chosen, nil
}
