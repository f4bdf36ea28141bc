// Command enqueuer plays many hosts that all enqueue the same task, each with an asynq scheduler of its own, as it happens
// when a nightly job is on every host's schedule.
//
//	enqueuer -redis localhost:6379                 20 hosts, report:nightly, every 10 s, until stopped
//	enqueuer -redis localhost:6379 -once           each host enqueues once
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

func main() {
	var e enqueuer
	flag.StringVar(&e.redis, "redis", os.Getenv("REDIS_ADDR"), "host:port of Redis (default: $REDIS_ADDR)")
	flag.IntVar(&e.hosts, "hosts", 20, "how many hosts to play")
	flag.StringVar(&e.taskType, "type", "report:nightly", "task type")
	flag.StringVar(&e.payload, "payload", "", `task payload, for instance {"date":"2025-03-01"}`)
	flag.DurationVar(&e.every, "every", 10*time.Second, "each host's period, in whole seconds")
	flag.DurationVar(&e.apart, "apart", 200*time.Millisecond, "time between one host's start and the next")
	flag.BoolVar(&e.once, "once", false, "enqueue once per host and exit")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := e.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "enqueuer:", err)
		os.Exit(1)
	}
}

type enqueuer struct {
	redis, taskType, payload string
	hosts                    int
	every, apart             time.Duration
	once                     bool
}

// run enqueues until ctx ends, or once with -once. It fails if Redis cannot be reached at the start; later a host that
// cannot enqueue says so and goes on, as it would in real life.
func (e enqueuer) run(ctx context.Context) error {
	switch {
	case e.redis == "":
		return errors.New("no Redis: set -redis host:port or REDIS_ADDR")
	case e.hosts < 1:
		return fmt.Errorf("-hosts %d: want at least 1", e.hosts)
	case e.every < time.Second:
		return fmt.Errorf("-every %v: want at least 1s", e.every)
	}
	if err := e.ping(ctx); err != nil {
		return fmt.Errorf("reach Redis at %s: %w", e.redis, err)
	}
	enqueue := e.schedule
	if e.once {
		enqueue = e.enqueue
	}
	for i := range e.hosts {
		stop, err := enqueue(ctx, fmt.Sprintf("host-%02d", i+1))
		if err != nil {
			return err
		}
		defer stop()
		select {
		case <-time.After(e.apart):
		case <-ctx.Done():
			if e.once {
				return context.Cause(ctx)
			}
			return nil
		}
	}
	if !e.once {
		slog.Info("all hosts are up: stop them with SIGINT or SIGTERM", "hosts", e.hosts)
		<-ctx.Done()
	}
	return nil
}

// schedule starts a host's scheduler. The caller must stop it.
func (e enqueuer) schedule(_ context.Context, host string) (stop func(), err error) {
	scheduler := asynq.NewScheduler(asynq.RedisClientOpt{Addr: e.redis}, &asynq.SchedulerOpts{
		LogLevel: asynq.ErrorLevel,
		PostEnqueueFunc: func(info *asynq.TaskInfo, err error) {
			report(host, info, err)
		},
	})
	if _, err := scheduler.Register("@every "+e.every.String(), e.task()); err != nil {
		return nil, fmt.Errorf("%s: register task: %w", host, err)
	}
	if err := scheduler.Start(); err != nil {
		return nil, fmt.Errorf("%s: start scheduler: %w", host, err)
	}
	slog.Info("scheduler started", "host", host, "every", e.every)
	return scheduler.Shutdown, nil
}

// enqueue enqueues the task of a host once.
func (e enqueuer) enqueue(ctx context.Context, host string) (stop func(), err error) {
	client := asynq.NewClient(asynq.RedisClientOpt{Addr: e.redis})
	defer client.Close()
	info, err := client.EnqueueContext(ctx, e.task())
	report(host, info, err)
	return func() {}, err
}

func (e enqueuer) task() *asynq.Task { return asynq.NewTask(e.taskType, []byte(e.payload)) }

func report(host string, info *asynq.TaskInfo, err error) {
	if err != nil {
		slog.Error("could not enqueue", "host", host, "error", err)
		return
	}
	slog.Info("enqueued", "host", host, "type", info.Type, "id", info.ID, "queue", info.Queue)
}

func (e enqueuer) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	rdb := redis.NewClient(&redis.Options{Addr: e.redis})
	defer rdb.Close()
	return rdb.Ping(ctx).Err()
}
