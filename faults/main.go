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
	"syscall"
	"time"

	"example.com/redislock/faults/history"
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

func campaigns() error {
	var names []string
	for _, c := range classes {
		names = append(names, c.name)
	}
	duration := flag.Duration("duration", time.Minute, "how long the faults of each class last")
	drain := flag.Duration("drain", 8*time.Second, "how long the workers may take to empty the queue afterwards")
	workers := flag.Int("workers", 8, "worker processes")
	keys := flag.Int("keys", 64, "different locks")
	rate := flag.Int("rate", 400, "tasks a second")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "replays the same schedule of faults and the same tasks")
	server := flag.String("server", "", "redis-server or valkey-server to run (default: redis-server in PATH)")
	dir := flag.String("dir", "", "keep the histories here (default: a temporary directory, kept if there is a violation)")
	faults := flag.String("faults", "all", "classes, separated by commas: "+strings.Join(names, ", "))
	again := flag.Bool("check", false, "check the histories in -dir once more, and run nothing")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	chosen, err := chooseClasses(*faults)
	if err != nil {
		return err
	}
	var program string
	if *again && *dir == "" {
		return errors.New("-check needs -dir")
	}
	if !*again {
		if program, err = findServer(*server); err != nil {
			return err
		}
	}
	root := *dir
	if root == "" {
		if root, err = os.MkdirTemp("", "redislock-faults-"); err != nil {
			return err
		}
	} else if root, err = filepath.Abs(root); err != nil {
		return err
	}
	bad := 0
	for _, class := range chosen {
		c := campaign{
			class: class, server: program, dir: filepath.Join(root, class.name), seed: *seed,
			duration: *duration, drain: *drain, workers: *workers, keys: *keys, rate: *rate,
		}
		run := c.run
		if *again {
			run = func(context.Context) ([]history.Record, error) { return history.ReadDir(c.dir) }
		}
		records, err := run(ctx)
		if err != nil {
			return fmt.Errorf("class %s: %w", class.name, err)
		}
		f := history.Check(records, terms)
		report(os.Stdout, class, f)
		if len(f.Violations) > 0 && !*again {
			fmt.Printf("  histories: %s\n  again: go run . -faults %s -duration %v -drain %v -workers %d -keys %d -rate %d -seed %d -server %s\n",
				c.dir, class.name, *duration, *drain, *workers, *keys, *rate, *seed, program)
		}
		bad += len(f.Violations)
	}
	if bad > 0 {
		return fmt.Errorf("%d violations", bad)
	}
	if *dir == "" {
		return os.RemoveAll(root)
	}
	return nil
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
