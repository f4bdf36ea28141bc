package main

import (
	"errors"
	"fmt"
	"testing"

	"example.com/redislock"
	"github.com/hibiken/asynq"
)

func TestKindOfKey(t *testing.T) {
	keys := make(map[string]int)
	for key := range 130 {
		keys[kindOfKey(key)]++
	}
	for _, k := range kinds {
		if keys[k.name] != 10*k.share {
			t.Errorf("%s has %d of 130 keys, for a share of %d in 13", k.name, keys[k.name], k.share)
		}
	}
}

// TestChoice wants what the checker believes of the policy function to be what it does.
func TestChoice(t *testing.T) {
	held := &redislock.HeldError{Key: "k"}
	seen := make(map[string]int)
	for i := range 1000 {
		id := fmt.Sprintf("t%06d", i)
		var err error
		switch choice(id) {
		case 0:
			if !mayDrop("func", id) || decideFor(id, held) != nil {
				t.Fatalf("%s: not dropped", id)
			}
			seen["dropped"]++
			continue
		case 1:
			err = held
			seen["put back"]++
		case 2:
			err = asynq.SkipRetry
			seen["archived"]++
		default:
			seen["failed"]++
		}
		if mayDrop("func", id) {
			t.Fatalf("%s may be dropped, though it is not", id)
		}
		if got := decideFor(id, held); got == nil || err != nil && !errors.Is(got, err) || err == nil && (errors.Is(got, held) || errors.Is(got, asynq.SkipRetry)) {
			t.Fatalf("%s: %v, want %v", id, got, err)
		}
	}
	for _, choice := range []string{"dropped", "put back", "archived", "failed"} {
		if seen[choice] < 200 {
			t.Errorf("%s: %d of 1000", choice, seen[choice])
		}
	}
	for _, k := range []string{"retry", "wait", "once", "archive", "nested", "open"} {
		if mayDrop(k, "t000000") {
			t.Errorf("%s may be dropped", k)
		}
	}
	if !mayDrop("skip", "t000000") {
		t.Error("skip may not be dropped")
	}
}
