package pgfence

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrStale says that a resource was claimed or written by a later holder: this one has lost its lock, whatever it still
// believes. Nothing of its work may be committed.
var ErrStale = errors.New("pgfence: fence is stale")

// DB is what Claim needs: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

//go:embed schema.sql
var schema string

// Migrate creates the tables of this package that are not there, in the first schema of the pool's search_path. It may be run
// by many hosts at once, and at every start, by the user who owns the tables: PostgreSQL refuses others even if nothing is
// missing. Its SQL is in schema.sql, for those who keep their migrations elsewhere.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if pool == nil {
		return errors.New("pgfence: migrate: the pool is nil")
	}
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// IF NOT EXISTS alone fails where two look at once.
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtext('redislock schema'))"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, schema)
		return err
	})
	if err != nil {
		return fmt.Errorf("pgfence: migrate: %w", err)
	}
	return nil
}

// advance moves a resource's number up, and holds its row until the transaction ends.
const advance = `INSERT INTO redislock_fences AS f (resource, fence) VALUES ($1, $2)
ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence WHERE f.fence `

// Claim takes a resource at the start of the work: from its commit on, holders with a lower number are refused. fence is what
// Lock.Fence returned, and a lock claims once: Claim fails with ErrStale if the resource has this number already, or a higher
// one. It waits for a writing transaction under Guard to end, so bound it by ctx, or by lock_timeout. resource is what is
// written to, 1 to 1000 bytes of UTF-8; locks that guard one resource must have one key, or their numbers can't be compared.
func Claim(ctx context.Context, db DB, resource string, fence int64) error {
	if isNil(db) {
		return errors.New("pgfence: claim: the database is nil")
	}
	return move(ctx, db, "claim", "< excluded.fence", resource, fence)
}

// Guard stands in a writing transaction, before the writes: it makes fence the resource's number, or fails with ErrStale if that is
// higher already, and then the transaction must not commit. Until it ends, the resource's row is locked, so that no newer holder
// can come between the check and the writes. The holder whose number it is may write as often as it likes.
func Guard(ctx context.Context, tx pgx.Tx, resource string, fence int64) error {
	if isNil(tx) {
		return errors.New("pgfence: guard: the transaction is nil")
	}
	return move(ctx, tx, "guard", "<= excluded.fence", resource, fence)
}

func move(ctx context.Context, db DB, verb, below, resource string, fence int64) error {
	if resource == "" || len(resource) > 1000 || !utf8.ValidString(resource) || strings.Contains(resource, "\x00") {
		return fmt.Errorf("pgfence: %s %q: want a resource of 1 to 1000 bytes of UTF-8 without NUL", verb, resource)
	}
	if fence < 1 {
		return fmt.Errorf("pgfence: %s %s: fence %d: want 1 or more, as Lock.Fence returns with WithFencing", verb, resource, fence)
	}
	tag, err := db.Exec(ctx, advance+below, resource, fence)
	switch {
	case err != nil:
		return fmt.Errorf("pgfence: %s %s with fence %d: %w", verb, resource, fence, explain(err))
	case tag.RowsAffected() == 0:
		return fmt.Errorf("%w: %s %s with fence %d: a later holder has been there", ErrStale, verb, resource, fence)
	}
	return nil
}

func isNil(db any) bool {
	v := reflect.ValueOf(db)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// explain adds what helps to the error of a missing table.
func explain(err error) error {
	var refusal *pgconn.PgError
	if errors.As(err, &refusal) && refusal.Code == "42P01" { // undefined_table
		return fmt.Errorf("%w; has pgfence.Migrate been run?", err)
	}
	return err
}
