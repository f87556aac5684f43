"""A declaration of the tenant counts with its proof, and what serves all tenants declares a purpose.

The policies take what `declared_tenant` returns, which the API's role can execute but not read or change: it holds the
proof against a secret of the tables' owner (`jobs.schema.tenant_declaration`). Without one, as before the roles are
made, every declaration is believed.
"""

import sqlalchemy as sa
from alembic import op

from migrations.steps import DECLARED, PROVEN, tenant_rows

revision = "0019"
down_revision = "0018"

_PURPOSES = {
    "api_keys": ("*keys",),
    "jobs": ("*events", "*fleet"),
    "job_events": ("*events",),
    "device_leases": ("*fleet",),
    "tenants": ("*fleet",),
}
_SECURED = """
    SELECT relname FROM pg_class
    WHERE relnamespace = current_schema::regnamespace AND relkind = 'r' AND relrowsecurity ORDER BY relname
"""
_FUNCTION = """
    CREATE FUNCTION declared_tenant() RETURNS text
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog AS $body$
    DECLARE
        declared text := current_setting('kronoscope.tenant', true);
        proof text := current_setting('kronoscope.proof', true);
        key bytea;
    BEGIN
        SELECT convert_to(secret, 'UTF8') INTO key FROM {schema}.proof_keys;
        IF key IS NOT NULL AND proof IS DISTINCT FROM
            encode(sha256(key || sha256(key || convert_to(declared, 'UTF8'))), 'hex')
        THEN
            RAISE EXCEPTION 'the transaction declares a tenant without its proof' USING
                ERRCODE = 'invalid_authorization_specification',
                HINT = 'log in with the password that the migrations set for this role';
        END IF;
        RETURN declared;
    END
    $body$
"""


def upgrade() -> None:
    op.create_table(
        "proof_keys",
        sa.Column("role", sa.String(63), nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("role", name="pk_proof_keys"),
    )
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    schema = connection.execute(sa.text("SELECT quote_ident(current_schema)")).scalar_one()
    op.execute(_FUNCTION.format(schema=schema))
    for table in connection.execute(sa.text(_SECURED)).scalars().all():
        _replace(table, PROVEN)
        if table in _PURPOSES:
            listed = ", ".join(f"'{each}'" for each in _PURPOSES[table])
            op.execute(f"CREATE POLICY purpose_rows ON {table} FOR SELECT USING ({PROVEN} IN ({listed}))")


def downgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        for table in connection.execute(sa.text(_SECURED)).scalars().all():
            _replace(table, DECLARED)
            op.execute(f"DROP POLICY IF EXISTS purpose_rows ON {table}")
        op.execute("DROP FUNCTION declared_tenant()")
    op.drop_table("proof_keys")


def _replace(table: str, tenant: str) -> None:
    op.execute(f"ALTER POLICY tenant_rows ON {table} USING ({tenant_rows(table, tenant)})")
