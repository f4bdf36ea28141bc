package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
)

func TestEachHostEnqueuesOnce(t *testing.T) {
	m := miniredis.RunT(t)
	e := enqueuer{redis: m.Addr(), hosts: 20, taskType: "report:nightly", payload: `{"date":"2025-03-01"}`, every: time.Second, once: true}
	if err := e.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	tasks := pending(t, m)
	if len(tasks) != 20 {
		t.Fatalf("want 20 tasks, got %d", len(tasks))
	}
	for _, task := range tasks {
		if task.Type != e.taskType || string(task.Payload) != e.payload {
			t.Errorf("got %s %s", task.Type, task.Payload)
		}
	}
}

func TestEachHostHasAScheduler(t *testing.T) {
	m := miniredis.RunT(t)
	e := enqueuer{redis: m.Addr(), hosts: 3, taskType: "report:nightly", every: time.Second}
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- e.run(ctx) }()
	for end := time.Now().Add(20 * time.Second); len(m.Keys()) == 0 || len(pending(t, m)) < 6; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("waited in vain for two rounds of 3 hosts")
		}
	}
	cancel()
	if err := <-stopped; err != nil {
		t.Errorf("stopped with %v", err)
	}
}

func TestMistakesAreNamed(t *testing.T) {
	for want, e := range map[string]enqueuer{
		"REDIS_ADDR":                     {hosts: 1, every: time.Second},
		"-hosts 0":                       {redis: "127.0.0.1:1", every: time.Second},
		"-every 1ms":                     {redis: "127.0.0.1:1", hosts: 1, every: time.Millisecond},
		"reach Redis at 127.0.0.1:1: di": {redis: "127.0.0.1:1", hosts: 1, every: time.Second},
	} {
		if err := e.run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want an error that says %q, got %v", want, err)
		}
	}
}

func pending(t *testing.T, m *miniredis.Miniredis) []*asynq.TaskInfo {
	t.Helper()
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: m.Addr()})
	defer inspector.Close()
	tasks, err := inspector.ListPendingTasks("default", asynq.PageSize(100))
	if err != nil && !strings.Contains(err.Error(), "not found") {
		t.Fatal(err)
	}
	return tasks
}
