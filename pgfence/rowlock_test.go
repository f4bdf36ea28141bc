package pgfence

import (
	"context"
	"errors"
	"testing"
	"time"

	"example.com/redislock"
)

func TestSmoke(t *testing.T) {
	pool := connect(t, database(t))
	l, err := New(pool, redislock.WithDoneFor(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "CREATE TABLE w (n int)"); err != nil {
		t.Fatal(err)
	}
	err = l.Do(t.Context(), "n", func(ctx context.Context) error {
		tx, ok := Tx(ctx)
		if !ok {
			t.Fatal("no tx")
		}
		if _, err := tx.Exec(ctx, "INSERT INTO w VALUES (1)"); err != nil {
			return err
		}
		h, ok, err := l.Holder(ctx, "n")
		t.Log(h, ok, err)
		err = l.Do(ctx, "n", func(context.Context) error { return nil })
		t.Log(err)
		if !errors.Is(err, redislock.ErrHeld) {
			t.Error(err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	err = l.Do(t.Context(), "n", func(context.Context) error { return nil })
	t.Log(err)
	if !errors.Is(err, redislock.ErrDone) {
		t.Error(err)
	}
	if err := l.Do(t.Context(), "m", func(ctx context.Context) error {
		tx, _ := Tx(ctx)
		_, err := tx.Exec(ctx, "INSERT INTO w VALUES (2)")
		return errors.Join(err, errors.New("no"))
	}); err == nil {
		t.Error("nil")
	}
	var n int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM w").Scan(&n); err != nil || n != 1 {
		t.Error(n, err)
	}
	if err := l.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}
