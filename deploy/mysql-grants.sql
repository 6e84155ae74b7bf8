-- What the two accounts of toc may do on each MySQL 8 or MariaDB server. Run it as an administrator once both
-- exist; running it again does no harm. Make them first, with a password each (and REQUIRE SSL where clients come
-- over TLS):
--
--     CREATE USER 'toc'@'%' IDENTIFIED BY '...';
--     CREATE USER 'toc_migrate'@'%' IDENTIFIED BY '...';
--
-- The databases are toc_0, toc_1, ...: in a grant, \_ is an underscore and % any text. With another
-- TOC_DATABASE_PREFIX write that instead, its underscores as \_ too.

-- The application, its workers and `toc` at an operator's hands: rows, and no table's shape. DELETE is for rows
-- that are finished and past their retention.
GRANT SELECT, INSERT, UPDATE, DELETE ON `toc\_%`.* TO 'toc'@'%';

-- `toc db upgrade`: makes databases and tables, and changes them. The revision of each database is a row.
-- DROP is for revisions that remove what nobody uses any more.
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, INDEX, DROP ON `toc\_%`.* TO 'toc_migrate'@'%';
